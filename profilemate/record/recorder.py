# SPDX-License-Identifier: Apache-2.0
"""The hot path: where hooks keep events until they are written.

A hook appends one tuple for an event (see ``encode``) and does no more. The hook that ends a step
calls ``step_ended``, which puts a mark behind it. The thread that packs and writes (see ``writer``)
writes whole steps, up to the last mark, and then takes them out. It takes from the front of the
list, hooks touch only its end, and each does so in one call at a time, so neither needs a lock.

Whatever is raised while the thread writes, the events are either in the journal or still in the
list: it tries again, and counts what it cannot write.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from profilemate.format.control import Asked
from profilemate.format.events import PARTS, Op
from profilemate.messages import cause, say
from profilemate.record import encode
from profilemate.record.backlog import Backlog
from profilemate.record.encode import Event
from profilemate.record.output import Costs, Output, say_lost
from profilemate.record.writer import Writer

STEP_PAUSE_SEC = 0.01
"""How long a step may wait to be written. A kill loses the steps that wait."""

WORKER_PAUSE_SEC = 0.1
"""The same for a worker's executions: no other row depends on them."""

MAX_WAITING = 250_000
"""Events, and ends of steps, that may wait for a disk that does not answer: some minutes of them,
and 100 MB at most, but for what the last step brings. One that holds much more than others counts
as several: see ``weigh``."""

EVENT_BYTES = 400
"""What an event takes in memory, at most, where it holds nothing that is long."""

EVENTS_IN_FRAME = 20_000
"""At most, so that no single call holds the GIL for long. But a step is never divided."""

PATIENCE_SEC = 5.0
"""How long the end of the process waits for a disk that does not answer."""

LAST_WORD_SEC = 1.0
"""How much of that is left to say that the rest is lost, where the disk is slow."""

LOOK_SEC = 0.25
"""How often it looks whether the user wants a pause."""

ATTEMPTS = 2
"""How often in a row writing may fail before the recording stops."""

_writer = Writer()


class Recorder:
    """One producer's events, on their way to its journal.

    The file descriptor is the recorder's from now on. ``name`` is what messages call it;
    ``pause_sec`` is how long events may wait to be written together; ``path`` is where the journal
    is, to open it again and to go on beside it, and ``backlog`` looks after its files. ``asked``
    is what the user asks for.

    ``keep`` takes an event. ``repeats`` counts the steps that were the same as the last one and
    scheduled nothing; they come before all later events. ``wants_pause``: the user wants nothing to
    be recorded now; the hooks see to it between two steps, and set ``is_paused``.

    What hooks call neither waits for a lock nor raises.
    """

    def __init__(
        self,
        fd: int,
        header: dict[str, Any],
        name: str,
        pause_sec: float = STEP_PAUSE_SEC,
        path: Path | None = None,
        backlog: Backlog | None = None,
        asked: Asked | None = None,
    ) -> None:
        self.name = name
        self.costs = Costs()
        self.repeats = 0
        self.repeated_until_ns = 0
        self.wants_pause = False
        self.is_paused = False
        # Each step's events, with a None before and behind them: its first is always one.
        self._events: list[Event | None] = [None]
        self.keep: Callable[[Event], None] = self._events.append
        self._writer = _writer
        self._writer.pause_sec = min(_writer.pause_sec, pause_sec)
        self._on_stop: list[Callable[[], None]] = []
        # The hooks' thread changes these:
        self._is_off = False
        self._failed: dict[str, str] = {}
        # The hooks' thread adds to these, the one that writes takes them out, each in one call:
        self._changes: list[dict[str, Any]] = []
        # Both change it. What one of them so misses is a little of the limit, until all is written.
        self._room = MAX_WAITING
        # The thread that writes changes these, and ``wants_pause``:
        self._asked = asked
        self._next_look = 0.0
        self._taken = 0
        self._entries = 0
        self._failures = 0
        self._gives_up = False
        # The one that ends the journal:
        self._is_ending = False
        self._end_by = 0.0
        self._has_said_late = False
        self._output = Output(fd, header, name, self.costs, path, backlog)
        self._writer.sources.append(self)

    @property
    def active(self) -> bool:
        """Whether events still reach the journal."""
        return not (self._is_off or self._output.lost)

    @property
    def dropped(self) -> int:
        """Events that are in no journal."""
        return self._output.dropped

    @property
    def waiting(self) -> int:
        """Steps that have ended, and changes, that are not in the journal yet."""
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

    def weigh(self, size: int) -> None:
        """An event that is kept now holds so many bytes, as long as it waits."""
        self._room -= size // EVENT_BYTES

    def on_stop(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when this recorder stops for good: it takes the hooks away again."""
        self._on_stop.append(undo)

    def take_hooks_away(self) -> None:
        """Undo what ``on_stop`` was given."""
        # Taken one by one: another thread may be at it, too.
        while self._on_stop:
            with contextlib.suppress(Exception):
                self._on_stop.pop(0)()

    def step_ended(self) -> None:
        """The events so far are whole and can be written."""
        events = self._events
        if self._is_off:
            self.costs.missed += len(self.take_back())
            return
        if self.repeats:
            self._keep_repeats()
        events.append(None)
        if len(events) > self._room:
            self._fall_behind()
        if self._writer.is_idle:
            self._writer.wake()

    def status(self, **changes: Any) -> None:
        """Record what changed about this producer, as long as its journal has not ended."""
        if self._output.is_closed:
            return
        self._changes.append(changes)
        if self._writer.is_idle:
            self._writer.wake()

    def fail(self, where: str, error: BaseException) -> None:
        """Stop for good after a hook raised: its events can no longer be trusted.

        The events since the last step ended are dropped, since they are not whole.
        """
        if self._failed:
            return
        self._failed, self._is_off = {where: type(error).__name__}, True
        # Called inside vLLM's own calls. Where this fails, too, the end of the journal says it.
        with contextlib.suppress(Exception):
            self._failed[where] = cause(error)
            self.status(failed=self._failed)
        self.take_hooks_away()
        say(f"{self.name}: recording stopped, {where} failed ({self._failed[where]}); vLLM goes on")

    def lose(self, parts: Iterable[str], where: str, error: BaseException) -> None:
        """Go on without these parts, whose hooks have been taken away."""
        if self._failed:
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
        """Have all events written, and wait for it."""
        self.step_ended()
        self._writer.finish(lambda: not self.waiting, PATIENCE_SEC)

    def write(self) -> bool:
        """Write the steps that have ended; returns whether there were any.

        One thread at a time calls it, and it may be interrupted anywhere.
        """
        written = False
        try:
            self.look()
            # What comes meanwhile is written the next time.
            for _ in range(0, len(self._events), EVENTS_IN_FRAME):
                written |= self._write()
                self._give_up_in_time()
            if self._is_ending:
                self._end()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if self._failures > 2 * ATTEMPTS:
                # Not even what has happened can be written.
                self._output.break_off()
                self._leave()
            elif self._failures >= ATTEMPTS:
                self._gives_up = True
                self.fail("writing", error)
            return True
        return written

    def look(self) -> bool:
        """Look whether the user wants a pause, where it is time to; returns whether to go on
        looking although nothing is to be written."""
        if self._asked is not None and self._writer.has_thread:
            now = time.monotonic()
            if now >= self._next_look:
                self._next_look = now + LOOK_SEC
                self.wants_pause = self._asked.is_paused()
        return self.wants_pause or self.is_paused

    def close(self) -> None:
        """End the journal in good order; during a write, when that is done."""
        if self._output.is_closed:
            return
        self._end_by = time.monotonic() + PATIENCE_SEC - LAST_WORD_SEC
        self._is_ending = True
        has_ended = self._writer.finish(lambda: self._output.is_closed, PATIENCE_SEC)
        if not has_ended:
            # Nobody waits any more: if the process lives on, all is written.
            self._end_by = math.inf
        missing = self.dropped + self._waiting_events()
        if missing and not (has_ended or self._has_said_late or self._writer.is_here):
            self._has_said_late = True
            say(
                f"{self.name}: the disk does not answer, {missing:,} events are not written and "
                "are lost if the process ends now"
            )
        self.take_hooks_away()

    def forget(self) -> None:
        """Let go without writing, as in a fork, where the journal is the parent's."""
        self._is_off = True
        self._leave()
        del self._events[1:]
        self._changes.clear()
        self.take_hooks_away()
        self._output.close()

    def _waiting_events(self) -> int:
        return len(self._events) - self._events.count(None)

    def _keep_repeats(self) -> None:
        """Keep the repeats as an event, before the events that came after them."""
        events = self.take_back()
        self.keep((encode.once, Op.REPEAT, self.repeated_until_ns, (self.repeats,)))
        self.repeats = 0
        self._events.extend(events)

    def _fall_behind(self) -> None:
        """The disk does not answer: write the events that wait, and take no more."""
        if not self._writer.is_stuck:
            # It is at it: steps were long, as with a batch of prompts.
            return
        self._is_off = True
        reason = f"{len(self._events):,} events wait for it"
        self.status(failed={"journal": reason})
        say_lost(self.name, reason)

    def _write(self) -> bool:
        """Write what waits, a frame at most; returns whether there was anything."""
        began = time.thread_time_ns()
        output, waiting = self._output, self._events
        output.settle()
        self._take_out()
        changes = self._changes.copy()
        end = self._end_of_frame()
        if not (end or changes):
            return False
        events = list(filter(None, waiting[:end]))
        if not (output.lost or self._gives_up):
            if events:
                self._entries = end
                self._writer.beat()
                output.write(events)
                self._take_out()
            else:
                del waiting[:end]
        if output.lost or self._gives_up:
            self._drop(end, len(events))
        for change in changes:
            output.status(change)
        del self._changes[: len(changes)]
        if len(waiting) <= EVENTS_IN_FRAME:
            self._room = MAX_WAITING
        if output.lost:
            output.report_loss()
        self.costs.writing_ns += time.thread_time_ns() - began
        return True

    def _take_out(self) -> None:
        """Take out the events that the last frame has brought into the journal."""
        written = self._output.written
        if written > self._taken:
            # In one line, so that nothing can come between.
            self._events[: self._entries], self._taken = [], written

    def _drop(self, end: int, events: int) -> None:
        """Take out so many events, which are lost."""
        costs = self.costs
        self._events[:end], costs.dropped = [], costs.dropped + events

    def _end_of_frame(self) -> int:
        """How far the steps go that have ended, a frame's at most."""
        waiting = self._events
        seen = waiting[:EVENTS_IN_FRAME]
        end = len(seen) - 1
        while seen[end] is not None:
            end -= 1
        if not end and len(waiting) > EVENTS_IN_FRAME:
            with contextlib.suppress(ValueError):
                end = waiting.index(None, 1)
        return end

    def _end(self) -> None:
        self.step_ended()
        while self._write():
            self._give_up_in_time()
        self._is_off = True
        if not self._output.is_closed:
            self._output.end({"failed": self._failed} if self._failed else {})
        self._leave()

    def _give_up_in_time(self) -> None:
        """At the end, leave the rest in time to say so."""
        is_late = self._is_ending and time.monotonic() > self._end_by
        if is_late and not self._gives_up and self._waiting_events():
            self._gives_up = True
            self.status(failed={"journal": "the disk was too slow to write all at the end"})

    def _leave(self) -> None:
        with contextlib.suppress(ValueError):
            self._writer.sources.remove(self)


def _living() -> list[Recorder]:
    """The recorders of this process whose journals have not ended."""
    return [source for source in _writer.sources.copy() if isinstance(source, Recorder)]


def _forget_all() -> None:
    for recorder in _living():
        recorder.forget()
    _writer.sources.clear()


def close_all() -> None:
    """End every journal of this process, as a courtesy at its exit."""
    for recorder in _living():
        recorder.close()


os.register_at_fork(after_in_child=_forget_all)
