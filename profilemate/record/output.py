# SPDX-License-Identifier: Apache-2.0
"""Put events into a journal, and say what is lost where the disk has no room for them.

One thread at a time uses this: the one that writes, or the one that ends the journal. Whatever
interrupts a call, it can be called again, and ``written`` says how many events are in the journal.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from profilemate.format import journal
from profilemate.format.events import Columns
from profilemate.format.journal import Kind
from profilemate.messages import say
from profilemate.record.backlog import LOOK_NS, Backlog
from profilemate.record.encode import Event
from profilemate.record.journal_writer import JournalWriter, identity, open_beside

RETRY_NS = 5_000_000_000
"""How often a producer that lost its disk tries to say how much it has dropped."""

SHRINKS_BYTES = 64
"""How much shorter the last frame on a full disk is than the frames that it replaces."""

SPARE_BYTES = 1024
"""What a new file holds to be given up where the disk is full by then."""

STATUS_NS = 5_000_000_000
"""How often the journal gets the costs of the recording so far."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_BROKEN_OFF = journal.frame(Kind.END, b'{"failed": {"journal": "its end could not be written"}}')


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

    ``name`` is what messages call the producer, ``path`` where the journal's first file is; without
    a path there is no second one. ``backlog`` looks after its files. ``lost`` says why the journal
    cannot be written; it is empty as long as it can.
    """

    def __init__(
        self,
        fd: int,
        header: dict[str, Any],
        name: str,
        costs: Costs,
        path: Path | None,
        backlog: Backlog | None = None,
    ) -> None:
        self.name = name
        self.lost = ""
        self._costs = costs
        self._file = JournalWriter(fd, path)
        self._path = path
        self._backlog = backlog
        self._folder = None if path is None else _identity_of(path.parent)
        self._number = 1
        self._earlier_bytes = 0
        self._full_at = journal.FILE_BYTES
        self._next: JournalWriter | None = None
        self._last_frame_at = 0
        self._is_left = ""
        self._has_said_lost = False
        self._written_ns = time.monotonic_ns()
        self._next_status_ns = self._written_ns + STATUS_NS
        self._next_look_ns = self._written_ns + LOOK_NS
        self._next_retry_ns = 0
        self._header = header
        self._append(self._beginning())
        if self.lost:
            self.report_loss()

    @property
    def is_closed(self) -> bool:
        return self._file.is_closed

    @property
    def written(self) -> int:
        """How many events have been written."""
        return self._file.events

    @property
    def dropped(self) -> int:
        """How many events are in no journal."""
        return self._costs.missed + self._costs.dropped + self._file.given_up

    def settle(self) -> None:
        """Let ``written`` say what is in the journal, where the last call was interrupted, and
        ``lost`` whether the journal is to go on."""
        self.lost = self.lost or self._is_left
        if not self.lost:
            try:
                self._file.settle()
            except OSError as error:
                self.lost = _reason(error)
        if self._next is not None:
            self._settle_turn(self._next)

    def write(self, events: list[Event]) -> None:
        """Write the events as one frame; ``lost`` is set where the journal cannot be written.

        Raises:
            Exception: an event cannot be packed.

        """
        columns = Columns()
        for event in events:
            event[0](columns, event)
        last = columns.times[-1] if columns.times else self._written_ns
        payload = columns.pack(self._written_ns)
        if len(payload) > journal.MAX_PAYLOAD:
            raise OverflowError(f"a step's events are {len(payload):,} bytes")
        # A write may take long, and needs only the frame.
        del columns
        data = journal.frame(Kind.EVENTS, payload)
        if last > self._next_status_ns:
            self._next_status_ns = last + STATUS_NS
            data += self._frame(Kind.STATUS, {})
        if self._append(data, len(events)):
            self._costs.flushes += 1
            self._written_ns = last
            if self._file.size >= self._full_at:
                self._go_on_in_next()
            if last > self._next_look_ns:
                self._look(last)

    def status(self, changes: dict[str, Any]) -> None:
        """Write what changed about the producer, where the journal can be written."""
        if not self.lost:
            self._append(self._frame(Kind.STATUS, changes))

    def report_loss(self) -> None:
        """Say why the journal cannot be written, and from time to time how much is lost."""
        if not self._has_said_lost:
            self._has_said_lost = True
            say_lost(self.name, self.lost)
        now = time.monotonic_ns()
        if now > self._next_retry_ns:
            self._next_retry_ns = now + RETRY_NS
            self._write_loss(Kind.STATUS)

    def end(self, changes: dict[str, Any]) -> None:
        """End the journal in good order, as far as the disk allows."""
        if not self.lost:
            self._append(self._frame(Kind.END, changes))
        if self.lost:
            self.report_loss()
            self._write_loss(Kind.END)
        self._file.close()

    def break_off(self) -> None:
        """End the journal where nothing else can be done."""
        with contextlib.suppress(Exception):
            self._file.append(_BROKEN_OFF)
        self._file.close()

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def _frame(self, kind: Kind, changes: dict[str, Any]) -> bytes:
        costs = {
            "dropped_events": self.dropped,
            "flushes": self._costs.flushes,
            "hook_ns": self._costs.hook_ns,
            "writing_ns": self._costs.writing_ns,
            "bytes": self._file.size,
            "earlier_bytes": self._earlier_bytes,
        }
        return journal.frame(kind, _json(changes | costs))

    def _beginning(self) -> bytes:
        header = {**self._header, "since": self._written_ns}
        return journal.MAGIC + journal.frame(Kind.HEADER, _json(header))

    def _go_on_in_next(self) -> None:
        """The file is full. Where no other can be made, it goes on, and another try follows."""
        self._full_at = self._file.size + journal.FILE_BYTES
        with contextlib.suppress(OSError):
            file = self._made_next()
            if file is not None:
                self._last_frame_at, self._next = self._file.size, file
                self._append(self._frame(Kind.STATUS, {"next": self._number + 1}))
                self._settle_turn(file)

    def _made_next(self) -> JournalWriter | None:
        """The next file, with a header and a frame that can be given up."""
        if self._path is None or self._folder is None:
            return None
        producer = self._path.stem
        path = self._path.with_name(journal.file_name(producer, self._number + 1))
        file = JournalWriter(open_beside(path, path.name, self._folder), path)
        try:
            file.follow(self._file)
            file.append(self._beginning())
            spare = {"bytes": file.size, "spare": " " * SPARE_BYTES}
            file.append(journal.frame(Kind.STATUS, _json(spare)))
        except OSError:
            file.close()
            raise
        return file

    def _settle_turn(self, file: JournalWriter) -> None:
        """Whoever reads the frame that names the next file goes on there. So it is used from then
        on, and not before, whatever interrupted the turn."""
        if self._file.size == self._last_frame_at:
            self._next = None
            file.close()
            return
        full = self._file
        self._full_at = journal.FILE_BYTES
        number, earlier = self._number + 1, self._earlier_bytes + full.size
        # In one line, so that nothing can come between.
        self._file, self._next, self._number, self._earlier_bytes = file, None, number, earlier
        full.close()
        self._look(self._written_ns)

    def _look(self, now: int) -> None:
        """Look after the journal's files, and for a collector."""
        self._next_look_ns = now + LOOK_NS
        if self._backlog is not None:
            self._is_left = self._backlog.look()

    def _append(self, data: bytes, events: int = 0) -> bool:
        try:
            self._file.append(data, events)
        except OSError as error:
            self.lost = _reason(error)
            return False
        return True

    def _write_loss(self, kind: Kind) -> None:
        """Write how much is lost; where there is no room, in the place of the last frames."""
        file, changes = self._file, {"failed": {"journal": self.lost}}
        if not file.size:
            return
        if not file.has_room:
            try:
                file.append(self._frame(kind, changes))
                return
            except OSError as error:
                if error.errno not in _FULL:
                    return
            file.make_room()
        # A reader sees that a frame was replaced by the file having become shorter.
        spare = SHRINKS_BYTES if kind is Kind.STATUS else 0
        file.put_last(self._frame(kind, {**changes, "spare": " " * spare}))


def _identity_of(folder: Path) -> tuple[int, int] | None:
    try:
        return identity(os.stat(folder))
    except OSError:
        return None


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _json(value: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        # Text of clients may be no Unicode: orjson refuses half a surrogate pair.
        return json.dumps(value, default=str).encode()


def say_lost(name: str, reason: str) -> None:
    """Tell the user that this producer's journal ends here."""
    say(f"{name}: recording stopped, the journal cannot be written ({reason}); vLLM goes on")
