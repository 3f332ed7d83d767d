# SPDX-License-Identifier: Apache-2.0
"""The hot path: where hooks keep what happened, until it is written.

A hook appends one tuple for an event (``profilemate.encode`` has them) and no more. The hook that
ends a step says so by ``step_ended``, which hands the step over, whole, to the thread that packs
and writes: ``profilemate.writer``.
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

from profilemate import encode, journal
from profilemate.encode import Kept
from profilemate.events import PARTS, Columns, Op
from profilemate.journal import JournalWriter, Kind
from profilemate.messages import say
from profilemate.writer import Writer

STEP_PAUSE_SEC = 0.01
"""How long a step may wait to be written: a kill loses it then, and the step under way."""

RETRY_NS = 5_000_000_000
"""How often a recorder that lost its disk tries to say how much it has dropped."""

SHRINKS_BYTES = 64
"""How much shorter the last frame on a full disk is than those that it replaces."""

STATUS_NS = 5_000_000_000
"""How often the journal is told what recording has cost so far."""

MAX_WAITING = 500_000
"""Events that may wait for a disk that does not answer; more than these are dropped. They are
what some minutes bring, and 100 MB."""

PATIENCE_SEC = 5.0
"""How long the end of a journal waits for a write that does not return."""

_recorders: list[weakref.ref[Recorder]] = []
"""Those of this process. A list can be copied while another thread appends to it."""


class Recorder:
    """One producer's events, and its journal.

    The file descriptor is the recorder's from now on. ``name`` is what messages call it.
    ``by_steps`` says that events belong together up to the end of each step, so that none is
    written before; else each may be at once.

    ``keep`` takes an event. ``step`` lists those since the last step ended, where they belong
    together. ``repeats`` counts the steps that were the same as the last one and scheduled nothing;
    what comes next is told after them. ``hook_ns`` is the time that the hooks at the ends of steps
    took, in nanoseconds; ``writing_ns`` the processor time of packing and writing.
    """

    def __init__(
        self, fd: int, header: dict[str, Any], name: str, *, by_steps: bool = True
    ) -> None:
        self.name = name
        self.dropped = 0
        self.flushes = 0
        self.hook_ns = 0
        self.writing_ns = 0
        self.repeats = 0
        self.repeated_until_ns = 0
        self.step: list[Kept] = []
        self._whole: list[Kept] = []
        self.keep: Callable[[Kept], None] = (self.step if by_steps else self._whole).append
        if by_steps:
            _writer.pause_sec = STEP_PAUSE_SEC
        self._file = JournalWriter(fd)
        self._writing = threading.Lock()
        self._written_by = 0
        self._is_ending = False
        self._columns = Columns()
        self._written_ns = time.monotonic_ns()
        self._next_status_ns = self._written_ns + STATUS_NS
        self._stopped = False
        self._lost = ""
        self._next_retry_ns = 0
        self._on_stop: list[Callable[[], None]] = []
        _recorders.append(weakref.ref(self))
        self._append(journal.MAGIC + journal.frame(Kind.HEADER, orjson.dumps(header)))

    @property
    def active(self) -> bool:
        """Whether events still reach the journal."""
        return not self._stopped and not self._lost

    @property
    def waiting(self) -> int:
        """Events of steps that ended, which are not in the journal yet."""
        with self._alone():
            return len(self._whole)

    def on_stop(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when this recorder stops for good: it takes the hooks away again."""
        self._on_stop.append(undo)

    def step_ended(self) -> None:
        """What was kept since the last step ended is whole."""
        step, whole = self.step, self._whole
        if self.repeats:
            told = encode.once, Op.REPEAT, self.repeated_until_ns, (self.repeats,)
            whole.append(told)
            self.repeats = 0
        whole.extend(step)
        step.clear()
        self.hand_over()

    def hand_over(self) -> None:
        """Have what is whole written."""
        if len(self._whole) > MAX_WAITING:
            self._fall_behind()
        if _writer.is_idle:
            _writer.wake()

    def flush(self) -> None:
        """Write what was kept, here and now. Never raises OSError."""
        self.step_ended()
        self.write()

    def write(self) -> bool:
        """Write the steps that have ended; returns whether there was anything."""
        if not self._whole:
            return False
        try:
            with self._alone() as alone:
                return alone and self._write()
        except Exception as error:
            self._columns.clear()
            self.fail("writing", error)
            return True

    def status(self, **changes: Any) -> None:
        """Write what changed about this producer."""
        if self.active:
            with self._alone() as alone:
                if alone:
                    self._write()
                    self._append(self._status_frame(Kind.STATUS, **changes))

    def fail(self, where: str, error: BaseException) -> None:
        """Stop for good after a hook raised: its events can no longer be trusted.

        What was kept since the last step ended is dropped, since it is not whole.
        """
        if self._stopped:
            return
        reason = f"{type(error).__name__}: {error}"
        self.dropped += len(self.step)
        self.step.clear()
        self.status(failed={where: reason})
        self._stop()
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

    def close(self) -> None:
        """End the journal in good order; if it is just being written, when that is done."""
        if self._file.is_closed:
            return
        if not self._stopped:
            self.step_ended()
        with self._alone() as alone:
            self._is_ending = not alone
            if not alone:
                return
            self._write()
            if self._lost:
                self._tell_loss(Kind.END)
            else:
                self._append(self._status_frame(Kind.END))
            self._stop()
            self._file.close()
        _recorders[:] = [known for known in _recorders if known() not in (None, self)]

    def forget(self) -> None:
        """Let go without writing: this process is a fork and the journal is its parent's."""
        self.step.clear()
        self._whole.clear()
        self._stop()
        self._file.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether nobody else writes; a write that does not return is not waited for forever.

        Nor does this thread, in the midst of a write: the garbage collector may run at any time,
        and find a scheduler whose end is that of this recorder.
        """
        me = threading.get_ident()
        taken = self._written_by != me and self._writing.acquire(timeout=PATIENCE_SEC)
        if not taken:
            yield False
            return
        self._written_by = me
        try:
            yield True
        finally:
            self._written_by = 0
            self._writing.release()
        if self._is_ending:
            self.close()

    def _write(self) -> bool:
        kept = self._whole[:]
        del self._whole[: len(kept)]
        if not kept:
            return False
        began = time.thread_time_ns()
        columns = self._columns
        for event in kept:
            event[0](columns, event)
        if columns.ops:
            self._write_frame(columns)
            columns.clear()
        self.writing_ns += time.thread_time_ns() - began
        return True

    def _write_frame(self, columns: Columns) -> None:
        events = len(columns.ops)
        if self._stopped or self._lost:
            self._drop(events)
            return
        last = columns.times[-1] if columns.times else self._written_ns
        data = journal.frame(Kind.EVENTS, columns.pack(self._written_ns))
        if last > self._next_status_ns:
            self._next_status_ns = last + STATUS_NS
            data += self._status_frame(Kind.STATUS)
        if not self._append(data, events):
            self._drop(events)
            self._tell_loss(Kind.STATUS)
        self.flushes += 1
        self._written_ns = last

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
            self._lose_disk(error.strerror or str(error))
            return False
        return True

    def _lose_disk(self, reason: str) -> None:
        self._lost = reason
        self._next_retry_ns = time.monotonic_ns() + RETRY_NS
        say(
            f"{self.name}: recording stopped, the journal cannot be written "
            f"({reason}); vLLM goes on"
        )

    def _fall_behind(self) -> None:
        """The disk does not answer."""
        if not self._lost:
            self._lose_disk(f"more than {MAX_WAITING:,} events wait for it")
        self.dropped += len(self._whole)
        self._whole.clear()

    def _drop(self, events: int) -> None:
        self.dropped += events
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
            self.dropped += file.make_room()
        # A reader sees that a frame was replaced by the file having become shorter.
        spare = SHRINKS_BYTES if kind is Kind.STATUS else 0
        file.put_last(self._status_frame(kind, failed=told, spare=" " * spare))

    def _stop(self) -> None:
        self._stopped = True
        undo, self._on_stop = self._on_stop, []
        for step in undo:
            step()


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
