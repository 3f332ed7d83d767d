# SPDX-License-Identifier: Apache-2.0
"""The hot path: where hooks keep events until they are written.

A hook appends one tuple for an event (see ``encode``) and does no more. The hook that ends a step
calls ``step_ended``, which puts a mark behind it. The thread that packs and writes (see ``writer``)
takes whole steps, up to the last mark. It takes from the front of the list, hooks touch only its
end, and each does so in one call at a time, so neither needs a lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from profilemate.format.events import PARTS, Op
from profilemate.messages import cause, say
from profilemate.record import encode
from profilemate.record.encode import Event
from profilemate.record.output import Costs, Output, say_lost
from profilemate.record.writer import Writer

STEP_PAUSE_SEC = 0.01
"""How long a step may wait to be written. A kill loses the steps that wait."""

WORKER_PAUSE_SEC = 0.1
"""The same for a worker's executions: no other row depends on them."""

MAX_WAITING = 500_000
"""Events, and ends of steps, that may wait for a disk that does not answer: some minutes of them,
and 100 MB."""

EVENTS_IN_FRAME = 20_000
"""At most, so that no single call holds the GIL for long. But a step is never divided."""

PATIENCE_SEC = 5.0
"""How long the end of a journal waits for a write that does not return."""

_recorders: list[weakref.ref[Recorder]] = []
"""The recorders of this process. A list can be copied while another thread appends to it."""


class Recorder:
    """One producer's events, on their way to its journal.

    The file descriptor is the recorder's from now on. ``name`` is what messages call it;
    ``pause_sec`` is how long events may wait to be written together.

    ``keep`` takes an event. ``repeats`` counts the steps that were the same as the last one and
    scheduled nothing; they come before all later events.

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
        self.costs = Costs()
        self.repeats = 0
        self.repeated_until_ns = 0
        # Each step's events, with a None before and behind them: its first is always one.
        self._events: list[Event | None] = [None]
        self.keep: Callable[[Event], None] = self._events.append
        _writer.pause_sec = min(_writer.pause_sec, pause_sec)
        self._on_stop: list[Callable[[], None]] = []
        # The hooks' thread changes these:
        self._is_off = False
        self._stopped = False
        # The hooks' thread adds to these, the one that writes takes them out, each in one call:
        self._changes: list[dict[str, Any]] = []
        # The thread that writes changes these, one at a time:
        self._writing = threading.RLock()
        self._is_ending = False
        self._problem: Exception | None = None
        _recorders.append(weakref.ref(self))
        self._output = Output(fd, header, name, self.costs)

    @property
    def active(self) -> bool:
        """Whether events still reach the journal."""
        return not (self._is_off or self._output.lost)

    @property
    def dropped(self) -> int:
        """Events that are in no journal."""
        return self.costs.missed + self.costs.dropped

    @property
    def waiting(self) -> int:
        """Steps that have ended, and changes, that are not in the journal yet."""
        with self._writing:
            return self._events.count(None) - 1 + len(self._changes)

    @property
    def has_news(self) -> bool:
        """Whether there is an event since the last step ended."""
        return self._events[-1] is not None

    def under_way(self) -> list[Event]:
        """The events since the last step ended."""
        all_events: list[Event | None] = self._events
        events: list[Event] = []
        while (event := all_events[-1 - len(events)]) is not None:
            events.append(event)
        return events[::-1]

    def take_back(self) -> list[Event]:
        """Remove the events since the last step ended; returns them."""
        events = self.under_way()
        if events:
            # Counted from the end: the front may be taken meanwhile.
            del self._events[-len(events) :]
        return events

    def on_stop(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when this recorder stops for good: it takes the hooks away again."""
        self._on_stop.append(undo)

    def step_ended(self) -> None:
        """The events so far are whole and can be written."""
        events = self._events
        if self._is_off:
            self.costs.missed += len(self.take_back())
            return
        if self.repeats:
            self._keep_repeats()
        events.append(None)
        if len(events) > MAX_WAITING:
            self._fall_behind()
        if _writer.is_idle:
            _writer.wake()

    def status(self, **changes: Any) -> None:
        """Record what changed about this producer, as long as its journal has not ended."""
        if self._output.is_closed:
            return
        self._changes.append(changes)
        if _writer.is_idle:
            _writer.wake()

    def fail(self, where: str, error: BaseException) -> None:
        """Stop for good after a hook raised: its events can no longer be trusted.

        The events since the last step ended are dropped, since they are not whole.
        """
        if self._stopped:
            return
        self._stopped = self._is_off = True
        reason = cause(error)
        self.status(failed={where: reason})
        self._take_hooks_away()
        say(f"{self.name}: recording stopped, {where} failed ({reason}); vLLM goes on")

    def lose(self, parts: Iterable[str], where: str, error: BaseException) -> None:
        """Go on without these parts, whose hooks have been taken away."""
        if self._stopped:
            return
        reason = f"{where}: {cause(error)}"
        lost = {}
        for part in parts:
            self.keep((encode.once, Op.LOST, time.monotonic_ns(), (list(PARTS).index(part),)))
            lost[part] = {"tables": PARTS[part], "reason": reason}
        self.status(lost=lost)
        tables = "; ".join(PARTS[part] for part in lost)
        say(
            f"{self.name}: no longer recorded: {tables} ({reason}). "
            "The rest is recorded, and vLLM goes on"
        )

    def flush(self) -> None:
        """Write all events, here and now."""
        self.step_ended()
        with self._alone() as alone:
            while alone and self._write():
                pass

    def write(self) -> bool:
        """Write the steps that have ended; returns whether there were any."""
        written = False
        with self._alone() as alone:
            if alone:
                # What comes meanwhile is written the next time.
                for _ in range(0, len(self._events), EVENTS_IN_FRAME):
                    written |= self._write()
        if self._problem is not None:
            self.fail("writing", self._problem)
        return written

    def close(self) -> None:
        """End the journal in good order; during a write, when that is done."""
        if self._output.is_closed:
            return
        self._is_ending = True
        with self._alone() as alone:
            if alone and not self._output.is_closed:
                self._is_ending = False
                self._end()
        self._take_hooks_away()
        _recorders[:] = [known for known in _recorders if known() not in (None, self)]

    def forget(self) -> None:
        """Let go without writing: this process is a fork and the journal is its parent's."""
        self._stopped = self._is_off = True
        del self._events[1:]
        self._changes.clear()
        self._take_hooks_away()
        self._output.close()

    def _keep_repeats(self) -> None:
        """Keep the repeats as an event, before the events that came after them."""
        events = self.take_back()
        self.keep((encode.once, Op.REPEAT, self.repeated_until_ns, (self.repeats,)))
        self.repeats = 0
        self._events.extend(events)

    def _fall_behind(self) -> None:
        """The disk does not answer: write the events that wait, and take no more."""
        self._is_off = True
        reason = f"{MAX_WAITING:,} events wait for it"
        self.status(failed={"journal": reason})
        say_lost(self.name, reason)

    def _take_hooks_away(self) -> None:
        # Taken one by one: another thread may be at it, too.
        with contextlib.suppress(IndexError):
            while True:
                self._on_stop.pop(0)()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether no write is under way; one that does not return is not waited for forever.

        This very thread may be in the midst of one: the garbage collector can run at any time, and
        find a scheduler whose end is the end of this recorder.
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
        if len(self._events) == 1 and not self._changes:
            return False
        began = time.thread_time_ns()
        events = self._take()
        changes = self._changes.copy()
        del self._changes[: len(changes)]
        if self._problem is not None:
            self._output.drop(len(events))
        else:
            try:
                self._output.write(events)
            except Exception as error:
                self._problem = error
        for change in changes:
            self._output.status(change)
        self.costs.writing_ns += time.thread_time_ns() - began
        return bool(events or changes)

    def _take(self) -> list[Event]:
        """Take out the events of steps that have ended, a frame's at most."""
        waiting = self._events
        seen = waiting[:EVENTS_IN_FRAME]
        end = len(seen) - 1
        while seen[end] is not None:
            end -= 1
        if not end and len(waiting) > EVENTS_IN_FRAME:
            with contextlib.suppress(ValueError):
                end = waiting.index(None, 1)
        events = list(filter(None, waiting[:end]))
        del waiting[:end]
        return events

    def _end(self) -> None:
        self.step_ended()
        while self._write():
            pass
        if self._problem is not None and not self._stopped:
            self.fail("writing", self._problem)
            self._write()
        self._output.end()
        self._stopped = self._is_off = True


def _living() -> list[Recorder]:
    return [recorder for known in _recorders.copy() if (recorder := known()) is not None]


def _write_all() -> bool:
    """Write what waits in the recorders of this process; returns whether there was anything."""
    written = [recorder.write() for recorder in _living()]
    return any(written)


_writer = Writer(_write_all)


def _forget_all() -> None:
    for recorder in _living():
        recorder.forget()
    _recorders.clear()


def close_all() -> None:
    """End every journal of this process, as a courtesy at its exit."""
    for recorder in _living():
        recorder.close()


os.register_at_fork(after_in_child=_forget_all)
