# SPDX-License-Identifier: Apache-2.0
"""Put events into a journal, and say what is lost where the disk has no room for them.

One thread at a time uses this: the one that writes, or the one that ends the journal.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import orjson

from profilemate.format import journal
from profilemate.format.events import Columns
from profilemate.format.journal import JournalWriter, Kind
from profilemate.messages import say
from profilemate.record.encode import Event

RETRY_NS = 5_000_000_000
"""How often a producer that lost its disk tries to say how much it has dropped."""

SHRINKS_BYTES = 64
"""How much shorter the last frame on a full disk is than the frames that it replaces."""

STATUS_NS = 5_000_000_000
"""How often the journal gets the costs of the recording so far."""


@dataclass(slots=True)
class Costs:
    """What recording has cost so far.

    ``missed`` counts the events that came when recording had stopped, ``dropped`` those that could
    not be written. ``hook_ns`` is the time that the hooks at the ends of steps took, ``writing_ns``
    the processor time of packing and writing, both in nanoseconds.
    """

    missed: int = 0
    dropped: int = 0
    flushes: int = 0
    hook_ns: int = 0
    writing_ns: int = 0


class Output:
    """One producer's journal. The file descriptor belongs to it from now on.

    ``name`` is what messages call the producer. ``lost`` says why the journal cannot be written;
    it is empty as long as it can.
    """

    def __init__(self, fd: int, header: dict[str, Any], name: str, costs: Costs) -> None:
        self.name = name
        self.lost = ""
        self._costs = costs
        self._columns = Columns()
        self._file = JournalWriter(fd)
        self._written_ns = time.monotonic_ns()
        self._next_status_ns = self._written_ns + STATUS_NS
        self._next_retry_ns = 0
        header = {**header, "since": self._written_ns}
        self._append(journal.MAGIC + journal.frame(Kind.HEADER, orjson.dumps(header)))

    @property
    def is_closed(self) -> bool:
        return self._file.is_closed

    def write(self, events: list[Event]) -> None:
        """Write the events as one frame, or drop them where the journal cannot be written.

        What it raises comes from an event that cannot be packed; all are dropped then.
        """
        if self.lost:
            self.drop(len(events))
            return
        if not events:
            return
        try:
            self._write(events)
        except Exception:
            self.drop(len(events))
            raise
        finally:
            self._columns.clear()

    def status(self, changes: dict[str, Any]) -> None:
        """Write what changed about the producer, where the journal can be written."""
        if not self.lost:
            self._append(self._frame(Kind.STATUS, changes))

    def drop(self, events: int) -> None:
        """Count so many events as lost."""
        self._costs.dropped += events
        now = time.monotonic_ns()
        if self.lost and now > self._next_retry_ns:
            self._next_retry_ns = now + RETRY_NS
            self._report_loss(Kind.STATUS)

    def end(self) -> None:
        """End the journal in good order, as far as the disk allows."""
        if self.lost:
            self._report_loss(Kind.END)
        else:
            self._append(self._frame(Kind.END, {}))
        self._file.close()

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def _write(self, events: list[Event]) -> None:
        columns = self._columns
        for event in events:
            event[0](columns, event)
        last = columns.times[-1] if columns.times else self._written_ns
        data = journal.frame(Kind.EVENTS, columns.pack(self._written_ns))
        if last > self._next_status_ns:
            self._next_status_ns = last + STATUS_NS
            data += self._frame(Kind.STATUS, {})
        if self._append(data, len(columns.ops)):
            self._costs.flushes += 1
            self._written_ns = last
        else:
            self._costs.dropped += len(columns.ops)
            self._report_loss(Kind.STATUS)

    def _frame(self, kind: Kind, changes: dict[str, Any]) -> bytes:
        costs = {
            "dropped_events": self._costs.missed + self._costs.dropped,
            "flushes": self._costs.flushes,
            "hook_ns": self._costs.hook_ns,
            "writing_ns": self._costs.writing_ns,
            "bytes": self._file.size,
        }
        return journal.frame(kind, orjson.dumps(changes | costs))

    def _append(self, data: bytes, events: int = 0) -> bool:
        try:
            self._file.append(data, events)
        except OSError as error:
            self.lost = error.strerror or str(error)
            self._next_retry_ns = time.monotonic_ns() + RETRY_NS
            say_lost(self.name, self.lost)
            return False
        return True

    def _report_loss(self, kind: Kind) -> None:
        """Write how much is lost; where there is no room, in the place of the last frames."""
        file, changes = self._file, {"failed": {"journal": self.lost}}
        if not file.size:
            return
        if not file.has_room:
            with contextlib.suppress(OSError):
                file.append(self._frame(kind, changes))
                return
            self._costs.dropped += file.make_room()
        # A reader sees that a frame was replaced by the file having become shorter.
        spare = SHRINKS_BYTES if kind is Kind.STATUS else 0
        file.put_last(self._frame(kind, {**changes, "spare": " " * spare}))


def say_lost(name: str, reason: str) -> None:
    """Tell the user that this producer's journal ends here."""
    say(f"{name}: recording stopped, the journal cannot be written ({reason}); vLLM goes on")
