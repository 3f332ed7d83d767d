# SPDX-License-Identifier: Apache-2.0
"""The hot path: where hooks keep what happened, until it is written.

A hook appends one tuple for an event (see ``encode``) and no more. The hook that ends a step calls
``step_ended``, which puts a mark behind it. The thread that packs and writes (see ``writer``) takes
what is before a mark, whole. It takes from the front of the list, hooks touch its end alone, and
each does so by one call at a time, so neither needs a lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import orjson

from profilemate.format import journal
from profilemate.format.events import PARTS, Columns, Op
from profilemate.format.journal import JournalWriter, Kind
from profilemate.messages import say
from profilemate.record import encode
from profilemate.record.encode import Kept
from profilemate.record.writer import Writer

STEP_PAUSE_SEC = 0.01
"""How long a step may wait to be written; until then a kill loses it."""

WORKER_PAUSE_SEC = 0.1
"""The same of a worker's executions: no later row hangs on them."""

RETRY_NS = 5_000_000_000
"""How often a recorder that lost its disk tries to say how much it has dropped."""

SHRINKS_BYTES = 64
"""How much shorter the last frame on a full disk is than those that it replaces."""

STATUS_NS = 5_000_000_000
"""How often the journal is told what recording has cost so far."""

MAX_WAITING = 500_000
"""Events, and ends of steps, that may wait for a disk that does not answer: some minutes, and
100 MB."""

EVENTS_IN_FRAME = 20_000
"""At most, so that no single call holds the GIL for long; but a step is never divided."""

PATIENCE_SEC = 5.0
"""How long the end of a journal waits for a write that does not return."""

_recorders: list[weakref.ref[Recorder]] = []
"""Those of this process. A list can be copied while another thread appends to it."""


class Recorder:
    """One producer's events, and its journal.

    The file descriptor is the recorder's from now on. ``name`` is what messages call it;
    ``pause_sec`` is how long events may wait to be written together.

    ``keep`` takes an event. ``repeats`` counts the steps that were the same as the last one and
    scheduled nothing; what comes next is told after them. ``hook_ns`` is the time that the hooks at
    the ends of steps took, in nanoseconds; ``writing_ns`` the processor time of packing and
    writing.

    What hooks call neither waits for a lock nor raises.
    """

    def __init__(
        self,
        fd: int,
        header: dict[str, Any],
        name: str,
        pause_sec: float = STEP_PAUSE_SEC,
    ) -> None:
        self.name = name
        self.flushes = 0
        self.hook_ns = 0
        self.writing_ns = 0
        self.repeats = 0
        self.repeated_until_ns = 0
        # Each step's events, with a None before and behind them: its first is always one.
        self._kept: list[Kept | None] = [None]
        self.keep: Callable[[Kept], None] = self._kept.append
        _writer.pause_sec = min(_writer.pause_sec, pause_sec)
        self._on_stop: list[Callable[[], None]] = []
        # Of the hooks' thread:
        self._is_off = False
        self._stopped = False
        self._missed = 0
        # From there to the thread that writes, each taken and put by one call:
        self._changes: list[dict[str, Any]] = []
        # Of whoever writes, which one thread does at a time:
        self._writing = threading.RLock()
        self._is_ending = False
        self._columns = Columns()
        self._file = JournalWriter(fd)
        self._dropped = 0
        self._lost = ""
        self._problem: Exception | None = None
        self._written_ns = time.monotonic_ns()
        self._next_status_ns = self._written_ns + STATUS_NS
        self._next_retry_ns = 0
        _recorders.append(weakref.ref(self))
        self._append(journal.MAGIC + journal.frame(Kind.HEADER, orjson.dumps(header)))

    @property
    def active(self) -> bool:
        """Whether events still reach the journal."""
        return not (self._is_off or self._lost)

    @property
    def dropped(self) -> int:
        """Events that are in no journal."""
        return self._missed + self._dropped

    @property
    def waiting(self) -> int:
        """Steps that ended, and changes that were told, which are not in the journal yet."""
        with self._writing:
            return self._kept.count(None) - 1 + len(self._changes)

    @property
    def has_news(self) -> bool:
        """Whether an event was kept since the last step ended."""
        return self._kept[-1] is not None

    def under_way(self) -> list[Kept]:
        """The events since the last step ended."""
        kept: list[Kept | None] = self._kept
        events: list[Kept] = []
        while (event := kept[-1 - len(events)]) is not None:
            events.append(event)
        return events[::-1]

    def take_back(self) -> list[Kept]:
        """As ``under_way``; they are no longer kept."""
        events = self.under_way()
        if events:
            # Counted from the end: the front may be taken meanwhile.
            del self._kept[-len(events) :]
        return events

    def on_stop(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when this recorder stops for good: it takes the hooks away again."""
        self._on_stop.append(undo)

    def step_ended(self) -> None:
        """What was kept is whole, and is to be written."""
        kept = self._kept
        if self._is_off:
            self._missed += len(self.take_back())
            return
        if self.repeats:
            self._tell_repeats()
        kept.append(None)
        if len(kept) > MAX_WAITING:
            self._fall_behind()
        if _writer.is_idle:
            _writer.wake()

    def status(self, **changes: Any) -> None:
        """Tell what changed about this producer, as long as its journal has not ended."""
        if self._file.is_closed:
            return
        self._changes.append(changes)
        if _writer.is_idle:
            _writer.wake()

    def fail(self, where: str, error: BaseException) -> None:
        """Stop for good after a hook raised: its events can no longer be trusted.

        What was kept since the last step ended is dropped, since it is not whole.
        """
        if self._stopped:
            return
        self._stopped = self._is_off = True
        reason = f"{type(error).__name__}: {error}"
        self.status(failed={where: reason})
        self._take_hooks_away()
        say(f"{self.name}: recording stopped, {where} failed ({reason}); vLLM goes on")

    def lose(self, parts: Iterable[str], where: str, error: BaseException) -> None:
        """Go on without these parts, whose hooks are gone."""
        if self._stopped:
            return
        reason = f"{where}: {type(error).__name__}: {error}"
        lost = {}
        for part in parts:
            self.keep((encode.once, Op.LOST, time.monotonic_ns(), (list(PARTS).index(part),)))
            lost[part] = {"tables": PARTS[part], "reason": reason}
        self.status(lost=lost)
        tables = "; ".join(PARTS[part] for part in lost)
        say(f"{self.name}: no longer recorded: {tables} ({reason}). The rest is, and vLLM goes on")

    def flush(self) -> None:
        """Write what was kept, here and now."""
        self.step_ended()
        with self._alone() as alone:
            while alone and self._write():
                pass

    def write(self) -> bool:
        """Write steps that have ended; returns whether there were any."""
        written = False
        with self._alone() as alone:
            if alone:
                # What comes meanwhile is for the next time.
                for _ in range(0, len(self._kept), EVENTS_IN_FRAME):
                    written |= self._write()
        if self._problem is not None:
            self.fail("writing", self._problem)
        return written

    def close(self) -> None:
        """End the journal in good order; if it is just being written, when that is done."""
        if self._file.is_closed:
            return
        self._is_ending = True
        with self._alone() as alone:
            if alone and not self._file.is_closed:
                self._is_ending = False
                self._end()
        self._take_hooks_away()
        _recorders[:] = [known for known in _recorders if known() not in (None, self)]

    def forget(self) -> None:
        """Let go without writing: this process is a fork and the journal is its parent's."""
        self._stopped = self._is_off = True
        del self._kept[1:]
        self._changes.clear()
        self._take_hooks_away()
        self._file.close()

    def _tell_repeats(self) -> None:
        """Tell them before what has been kept since."""
        events = self.take_back()
        self.keep((encode.once, Op.REPEAT, self.repeated_until_ns, (self.repeats,)))
        self.repeats = 0
        self._kept.extend(events)

    def _fall_behind(self) -> None:
        """The disk does not answer: what waits is still written, and nothing from now on."""
        self._is_off = True
        reason = f"{MAX_WAITING:,} events wait for it"
        self.status(failed={"journal": reason})
        self._say_lost(reason)

    def _say_lost(self, reason: str) -> None:
        say(
            f"{self.name}: recording stopped, the journal cannot be written "
            f"({reason}); vLLM goes on"
        )

    def _take_hooks_away(self) -> None:
        # Taken one by one: another thread may be at it, too.
        with contextlib.suppress(IndexError):
            while True:
                self._on_stop.pop(0)()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether nobody else writes; a write that does not return is not waited for forever.

        Nor does this thread, in the midst of a write: the garbage collector may run at any time,
        and find a scheduler whose end is that of this recorder.
        """
        lock: Any = self._writing
        if lock._is_owned() or not lock.acquire(timeout=PATIENCE_SEC):
            yield False
            return
        try:
            yield True
        finally:
            lock.release()
        if self._is_ending:
            self.close()

    def _write(self) -> bool:
        """Write what waits, a frame at most; returns whether there was anything. Never raises."""
        if len(self._kept) == 1 and not self._changes:
            return False
        began = time.thread_time_ns()
        events = self._take()
        changes = self._changes.copy()
        del self._changes[: len(changes)]
        if self._lost or self._problem:
            self._drop(len(events))
        elif events:
            try:
                self._write_events(events)
            except Exception as error:
                self._problem = error
                self._drop(len(events))
            self._columns.clear()
        for change in changes:
            if not self._lost:
                self._append(self._status_frame(Kind.STATUS, **change))
        self.writing_ns += time.thread_time_ns() - began
        return bool(events or changes)

    def _take(self) -> list[Kept]:
        """Take out the events of steps that have ended, a frame's at most."""
        kept = self._kept
        seen = kept[:EVENTS_IN_FRAME]
        end = len(seen) - 1
        while seen[end] is not None:
            end -= 1
        if not end and len(kept) > EVENTS_IN_FRAME:
            with contextlib.suppress(ValueError):
                end = kept.index(None, 1)
        events = list(filter(None, kept[:end]))
        del kept[:end]
        return events

    def _write_events(self, events: list[Kept]) -> None:
        columns = self._columns
        for kept in events:
            kept[0](columns, kept)
        last = columns.times[-1] if columns.times else self._written_ns
        data = journal.frame(Kind.EVENTS, columns.pack(self._written_ns))
        if last > self._next_status_ns:
            self._next_status_ns = last + STATUS_NS
            data += self._status_frame(Kind.STATUS)
        if self._append(data, len(columns.ops)):
            self.flushes += 1
            self._written_ns = last
        else:
            self._dropped += len(columns.ops)
            self._tell_loss(Kind.STATUS)

    def _end(self) -> None:
        self.step_ended()
        while self._write():
            pass
        if self._problem is not None and not self._stopped:
            self.fail("writing", self._problem)
            self._write()
        if self._lost:
            self._tell_loss(Kind.END)
        else:
            self._append(self._status_frame(Kind.END))
        self._stopped = self._is_off = True
        self._file.close()

    def _status_frame(self, kind: Kind, **changes: Any) -> bytes:
        costs = {
            "dropped_events": self.dropped,
            "flushes": self.flushes,
            "hook_ns": self.hook_ns,
            "writing_ns": self.writing_ns,
            "bytes": self._file.size,
        }
        return journal.frame(kind, orjson.dumps(changes | costs))

    def _append(self, data: bytes, events: int = 0) -> bool:
        try:
            self._file.append(data, events)
        except OSError as error:
            self._lost = error.strerror or str(error)
            self._next_retry_ns = time.monotonic_ns() + RETRY_NS
            self._say_lost(self._lost)
            return False
        return True

    def _drop(self, events: int) -> None:
        self._dropped += events
        now = time.monotonic_ns()
        if self._lost and now > self._next_retry_ns:
            self._next_retry_ns = now + RETRY_NS
            self._tell_loss(Kind.STATUS)

    def _tell_loss(self, kind: Kind) -> None:
        """Say how much is lost; where there is no room, in the place of the last frames."""
        file, told = self._file, {"journal": self._lost}
        if not file.size:
            return
        if not file.has_room:
            with contextlib.suppress(OSError):
                file.append(self._status_frame(kind, failed=told))
                return
            self._dropped += file.make_room()
        # A reader sees that a frame was replaced by the file having become shorter.
        spare = SHRINKS_BYTES if kind is Kind.STATUS else 0
        file.put_last(self._status_frame(kind, failed=told, spare=" " * spare))


def _living() -> list[Recorder]:
    return [recorder for known in _recorders.copy() if (recorder := known()) is not None]


def _write_all() -> bool:
    """Write what the recorders of this process hold; returns whether there was anything."""
    written = [recorder.write() for recorder in _living()]
    return any(written)


_writer = Writer(_write_all)


def _forget_all() -> None:
    for recorder in _living():
        recorder.forget()
    _recorders.clear()


def close_all() -> None:
    """End every journal of this process: a courtesy at exit, where there is one."""
    for recorder in _living():
        recorder.close()


os.register_at_fork(after_in_child=_forget_all)
