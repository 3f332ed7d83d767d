# SPDX-License-Identifier: Apache-2.0
"""How long replays took on the GPU: CUDA events around each, read when they have passed.

Nothing here waits for the GPU. Times are reported in the order in which the replays were launched.
So later ones wait in a queue until the first one's events have passed, or the queue is too long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

MAX_INTERVALS = 4096
"""Event pairs in use at most. A replay that finds none is not timed."""

MAX_WAITING = 256
"""How many may wait for their time. When more come, the first is reported without it."""

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

    def when_done(self, intervals: Sequence[Interval], report: Callable[[int], None]) -> None:
        """Call ``report`` with the nanoseconds that these took together, once they are known.

        It gets ``NOT_MEASURED`` where they will not be.
        """
        self._waiting.append((intervals, report))
        while len(self._waiting) > MAX_WAITING:
            self._report_first(measured=False)
        self._report_passed()

    def give_up(self) -> None:
        """Report all that wait, without their time where it is not known yet."""
        self._report_passed()
        while self._waiting:
            self._report_first(measured=False)

    def _report_passed(self) -> None:
        while self._waiting and all(end.query() for _, end in self._waiting[0][0]):
            self._report_first(measured=True)

    def _report_first(self, *, measured: bool) -> None:
        intervals, report = self._waiting.popleft()
        if measured:
            total_ms = sum(begin.elapsed_time(end) for begin, end in intervals)
            self._free.extend(intervals)
            report(round(total_ms * 1e6))
        else:
            # Their events have not passed, so they cannot be used again.
            self._made -= len(intervals)
            report(NOT_MEASURED)
