# SPDX-License-Identifier: Apache-2.0
"""Turn steps into rows: consecutive ones that scheduled nothing are one row."""

from __future__ import annotations

from profilemate.collector.decode import Event
from profilemate.collector.lookups import WINDOW_NS
from profilemate.collector.tables import Append


class StepRows:
    """The steps of one engine. ``number`` is the last step's, counted from 1; ``preempted`` and
    ``finished`` count the requests since the last step's end."""

    def __init__(self, rank: int, origin_ns: int, append: Append) -> None:
        self.number = 0
        self.preempted = 0
        self.finished = 0
        self._rank = rank
        self._origin = origin_ns
        self._append = append
        self._idle: tuple[str, int] | None = None
        self._idle_state: tuple[int, ...] = ()
        self._repeats = 0

    def ended(self, event: Event) -> None:
        """A STEP event came: the step is counted, and its row written or held open."""
        self.number += 1
        running, waiting, tokens, prefill, scheduled = event.numbers[:5]
        row = (
            f"{(event.until - self._origin) / 1e9:.6f},{self.number},{running},{waiting},"
            f"{tokens},{prefill},{tokens - prefill},{scheduled},{self.preempted},"
            f"{self.finished},{(event.until - event.time) // 1000}"
        )
        same = not (tokens or self.preempted or self.finished)
        self.preempted = self.finished = 0
        state = (running, waiting)
        if same and self._idle is not None and state == self._idle_state:
            self._repeat(1, event.until)
            return
        self.close()
        if not tokens:
            self._idle, self._repeats = (row, event.until), 1
            self._idle_state = state
        else:
            self._append(f"{row},1,{self._rank}")

    def repeated(self, event: Event) -> None:
        """A REPEAT event came: the last step was repeated."""
        (count,) = event.numbers
        self.number += count
        self._repeat(count, event.time)

    def close(self) -> None:
        """Write the row that is open, if one is."""
        if self._idle is not None and self._repeats:
            self._append(f"{self._idle[0]},{self._repeats},{self._rank}")
        self._idle = None

    def _repeat(self, count: int, time: int) -> None:
        if self._idle is None:
            return
        self._repeats += count
        row, began = self._idle
        if time - began >= WINDOW_NS:
            self.close()
            fields = row.split(",")
            fields[0] = f"{(time - self._origin) / 1e9:.6f}"
            fields[1] = str(self.number + 1)
            fields[8] = fields[9] = "0"
            self._idle, self._repeats = (",".join(fields), time), 0
