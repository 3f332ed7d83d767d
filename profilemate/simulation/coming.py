# SPDX-License-Identifier: Apache-2.0
"""Which request comes next, and when?

In an open loop requests come at their times, and those that wait for an answer of the trace after
that. In a closed loop each turn of a conversation comes after the simulated answer to the one
before; with a number of users, each of them begins the next conversation when one has ended.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

import numpy as np

from analysis.whatif.users import EACH, Turns, turns
from analysis.whatif.workload import Workload


class Coming:
    """The requests of one engine that are still to come.

    Args:
        workload: the engine's requests.
        users: of a closed loop; None: an open loop, 0 (``EACH``): one for each conversation.

    """

    def __init__(self, workload: Workload, users: int | None) -> None:
        is_open = users is None
        found = Turns(workload.waits_for, workload.delay_sec) if is_open else turns(workload)
        self._think_sec = found.think_sec
        self._turns: dict[int, list[int]] = {}
        for number in np.flatnonzero(found.after >= 0).tolist():
            self._turns.setdefault(int(found.after[number]), []).append(number)
        first = np.flatnonzero(found.after < 0)
        times = workload.arrival_sec[first]
        # What comes in order of its time is a heap.
        self._coming = list(zip(times.tolist(), first.tolist(), strict=True))
        self._conversation: list[int] = []
        self._left: dict[int, int] = {}
        self._waiting: deque[int] = deque()
        if users is not None and users != EACH:
            self._conversation = found.first.tolist()
            for conversation in self._conversation:
                self._left[conversation] = self._left.get(conversation, 0) + 1
            begin = min(times.tolist(), default=0.0)
            self._coming = [(begin, number) for number in first[:users].tolist()]
            self._waiting = deque(first[users:].tolist())

    def __bool__(self) -> bool:
        return bool(self._coming)

    @property
    def next_sec(self) -> float:
        """When the next one comes; infinite after the last."""
        return self._coming[0][0] if self._coming else np.inf

    def pop(self) -> tuple[float, int]:
        """When the next one comes, and its number."""
        return heappop(self._coming)

    def ended(self, number: int, now: float) -> None:
        """This request has ended at this time, or can never run: what waited for it can come."""
        for turn in self._turns.pop(number, ()):
            heappush(self._coming, (now + float(self._think_sec[turn]), turn))
        if not self._left:
            return
        conversation = self._conversation[number]
        self._left[conversation] -= 1
        if not self._left[conversation] and self._waiting:
            heappush(self._coming, (now, self._waiting.popleft()))
