# SPDX-License-Identifier: Apache-2.0
"""The hot path: what hooks append to, and how it gets into the journal.

A hook appends to the columns of ``log`` directly, and the hook that ends a step says so by
``step_ended``. A frame is packed and written then, but not more often than every ``FLUSH_NS``:
in the middle of a scheduler's loop a write costs many times what it costs alone, since its code
and tables have left the processor's caches by then.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import orjson

from profilemate import journal
from profilemate.events import PARTS, Columns, Op
from profilemate.journal import Kind
from profilemate.messages import say

FLUSH_NS = 10_000_000
"""A step that ends sooner after the last write leaves its events for a later one to write."""

WORKER_FLUSH_NS = 100_000_000
"""As ``FLUSH_NS``, of a worker's executions: no later row hangs on those that a kill takes."""

RETRY_NS = 5_000_000_000
"""How often a recorder that lost its disk tries to say how much it has dropped."""

ROOM_BYTES = 512
"""What a full disk must have room for: a frame that says so."""

SHRINKS_BYTES = 64
"""How much shorter the last frame on a full disk is than those that it replaces."""

STATUS_NS = 5_000_000_000
"""How often the journal is told what recording has cost so far."""

_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


class Recorder:
    """One producer's buffer and journal.

    The file descriptor is the recorder's from now on. ``name`` is what messages call it;
    ``flush_ns`` is the least time between writes of ``step_ended``.
    ``repeats`` counts the steps that were the same as the last one written and scheduled
    nothing; the next flush tells them in one event. ``hook_ns`` is the time that the hooks at
    the ends of steps took, in nanoseconds; of a worker, where a write was among it.
    """

    def __init__(
        self, fd: int, header: dict[str, Any], name: str, flush_ns: int = FLUSH_NS
    ) -> None:
        self.log = Columns()
        self.name = name
        self.dropped = 0
        self.flushes = 0
        self.bytes_written = 0
        self.hook_ns = 0
        self._written_ns = time.monotonic_ns()
        self._flush_ns = flush_ns
        self._next_flush_ns = 0
        self._next_status_ns = time.monotonic_ns() + STATUS_NS
        self._fd = fd
        self.repeats = 0
        self.repeated_until_ns = 0
        self._stopped = False
        self._lost = ""
        self._has_room = False
        self._last_frames: deque[tuple[int, int]] = deque(maxlen=16)
        self._next_retry_ns = 0
        self._on_stop: list[Callable[[], None]] = []
        _recorders.add(self)
        self._write(journal.MAGIC + journal.frame(Kind.HEADER, orjson.dumps(header)))

    @property
    def active(self) -> bool:
        """Whether events still reach the journal."""
        return not self._stopped

    def on_stop(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when this recorder stops for good: it takes the hooks away again."""
        self._on_stop.append(undo)

    def step_ended(self, now: int) -> bool:
        """A step ended, at this monotonic time: its events are written if it is time.

        Returns whether it was.
        """
        if now < self._next_flush_ns:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Write what has been appended, in one frame. Never raises OSError."""
        log = self.log
        if not log.times and not self.repeats:
            return
        if self._stopped:
            self._drop()
            return
        if self.repeats:
            log.ops.insert(0, Op.REPEAT)
            log.numbers.insert(0, self.repeats)
            log.times.insert(0, self.repeated_until_ns)
            self.repeats = 0
        last = log.times[-1]
        data = journal.frame(Kind.EVENTS, log.pack(self._written_ns))
        if last > self._next_status_ns:
            self._next_status_ns = last + STATUS_NS
            data += self._status_frame(Kind.STATUS)
        if self._write(data, len(log.ops)):
            log.clear()
        else:
            self._drop()
            self._tell_loss(Kind.STATUS)
        self.flushes += 1
        self._written_ns = last
        self._next_flush_ns = last + self._flush_ns

    def status(self, **changes: Any) -> None:
        """Write what changed about this producer."""
        if not self._stopped:
            self._write(self._status_frame(Kind.STATUS, **changes))

    def fail(self, where: str, error: BaseException) -> None:
        """Stop for good after a hook raised: its events can no longer be trusted.

        What was appended since the last flush is dropped, since it may be half an event.
        """
        if self._stopped:
            return
        reason = f"{type(error).__name__}: {error}"
        self._drop()
        self.status(failed={where: reason})
        self._stop()
        say(f"{self.name}: recording stopped, {where} failed ({reason}); vLLM goes on")

    def lose(self, parts: Iterable[str], where: str, error: BaseException) -> None:
        """Go on without these parts, whose hooks are gone and left no half event in the log."""
        if self._stopped:
            return
        reason = f"{where}: {type(error).__name__}: {error}"
        lost = {}
        for part in parts:
            self.log.ops.append(Op.LOST)
            self.log.times.append(time.monotonic_ns())
            self.log.numbers.append(list(PARTS).index(part))
            lost[part] = {"tables": PARTS[part], "reason": reason}
        self.status(lost=lost)
        tables = "; ".join(PARTS[part] for part in lost)
        say(f"{self.name}: no longer recorded: {tables} ({reason}). The rest is, and vLLM goes on")

    def close(self) -> None:
        """End the journal in good order."""
        if self._fd < 0:
            return
        self.flush()
        if self._lost:
            self._tell_loss(Kind.END)
        else:
            self._write(self._status_frame(Kind.END))
        self._stop()
        self._close_fd()

    def forget(self) -> None:
        """Let go without writing: this process is a fork and the journal is its parent's."""
        self.log.clear()
        self._stop()
        self._close_fd()

    def _status_frame(self, kind: Kind, **changes: Any) -> bytes:
        costs = {
            "dropped_events": self.dropped,
            "flushes": self.flushes,
            "hook_ns": self.hook_ns,
            "bytes": self.bytes_written,
        }
        return journal.frame(kind, orjson.dumps(changes | costs))

    def _write(self, data: bytes, events: int = 0) -> bool:
        error = self._append(data, events)
        if error is None:
            return True
        self._stopped = True
        self._lost = error.strerror or str(error)
        self._next_retry_ns = time.monotonic_ns() + RETRY_NS
        say(
            f"{self.name}: recording stopped, the journal cannot be written "
            f"({self._lost}); vLLM goes on"
        )
        return False

    def _append(self, data: bytes, events: int = 0) -> OSError | None:
        """Write the data whole, or nothing of it; ``events`` are how many it holds."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            # A torn frame would hide every later one from the reader.
            self._cut_back()
            return error
        if self.bytes_written:
            self._last_frames.append((self.bytes_written, events))
        self.bytes_written += len(data)
        return None

    def _cut_back(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self.bytes_written)

    def _drop(self) -> None:
        self.dropped += len(self.log.ops)
        self.log.clear()
        now = time.monotonic_ns()
        if self._lost and self._fd >= 0 and now > self._next_retry_ns:
            self._next_retry_ns = now + RETRY_NS
            self._tell_loss(Kind.STATUS)

    def _tell_loss(self, kind: Kind) -> None:
        """Say how much is lost; where there is no room, in the place of the last frames."""
        if not self.bytes_written:
            return
        told = {"journal": self._lost}
        if not self._has_room:
            if self._append(self._status_frame(kind, failed=told)) is None:
                return
            self._make_room()
        self._cut_back()
        room = self.bytes_written
        # A reader sees that a frame was replaced by the file having become shorter.
        spare = SHRINKS_BYTES if kind is Kind.STATUS else 0
        self._append(self._status_frame(kind, failed=told, spare=" " * spare))
        self.bytes_written = room

    def _make_room(self) -> None:
        end = self.bytes_written
        while self._last_frames and end - self.bytes_written < ROOM_BYTES:
            self.bytes_written, events = self._last_frames.pop()
            self.dropped += events
        self._has_room = True

    def _stop(self) -> None:
        self._stopped = True
        undo, self._on_stop = self._on_stop, []
        for step in undo:
            step()

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _forget_all() -> None:
    for recorder in list(_recorders):
        recorder.forget()


def close_all() -> None:
    """End every journal of this process: a courtesy at exit, where there is one."""
    for recorder in list(_recorders):
        recorder.close()


os.register_at_fork(after_in_child=_forget_all)
