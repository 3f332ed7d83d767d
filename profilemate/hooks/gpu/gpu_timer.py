# SPDX-License-Identifier: Apache-2.0
"""How long replays took on the GPU: CUDA events around each, read when they have passed.

Nothing here waits for the GPU. What is timed is told in the order in which it was launched, so
all that comes after it waits in a queue, until its events have passed or too many are in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

MAX_INTERVALS = 4096
"""Event pairs in use at most: replays that find none are not timed."""

MAX_WAITING = 256
"""What waits for its time at most: when more comes, the first is told without."""

Interval = tuple[Any, Any]
"""Two CUDA events: before and after."""

NOT_MEASURED = -1


class GpuTimer:
    """Times intervals on the current stream. ``cuda`` is ``torch.cuda``."""

    def __init__(self, cuda: Any) -> None:
        self._event = cuda.Event
        self._is_capturing = cuda.is_current_stream_capturing
        self._made = 0
        self._free: list[Interval] = []
        self._waiting: deque[tuple[Sequence[Interval], Callable[[int], None]]] = deque()

    def begin(self) -> Interval | None:
        """Record the first event of an interval; None where it cannot be timed."""
        if self._is_capturing():
            return None
        if self._free:
            interval = self._free.pop()
        elif self._made < MAX_INTERVALS:
            self._made += 1
            interval = self._event(enable_timing=True), self._event(enable_timing=True)
        else:
            return None
        interval[0].record()
        return interval

    def when_done(self, intervals: Sequence[Interval], tell: Callable[[int], None]) -> None:
        """Call ``tell`` with the nanoseconds that these took together, once that is known.

        It is called with ``NOT_MEASURED`` where that cannot be told.
        """
        self._waiting.append((intervals, tell))
        while len(self._waiting) > MAX_WAITING:
            self._tell_first(measured=False)
        self._tell_passed()

    def give_up(self) -> None:
        """Tell all that waits, without its time where that is not known yet."""
        self._tell_passed()
        while self._waiting:
            self._tell_first(measured=False)

    def _tell_passed(self) -> None:
        while self._waiting and all(end.query() for _, end in self._waiting[0][0]):
            self._tell_first(measured=True)

    def _tell_first(self, *, measured: bool) -> None:
        intervals, tell = self._waiting.popleft()
        if measured:
            total_ms = sum(begin.elapsed_time(end) for begin, end in intervals)
            self._free.extend(intervals)
            tell(round(total_ms * 1e6))
        else:
            # Their events are still to come: they are not used again.
            self._made -= len(intervals)
            tell(NOT_MEASURED)
