# SPDX-License-Identifier: Apache-2.0
"""Hand out sessions to read, and take what was read in their order.

The order makes a result the same however many sessions are read at once. What waits for its turn
is bounded, whatever the number of sessions is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from profilemate.fleet.reading import Read

AHEAD = 16
"""For each session that is read at once, so many may be begun after one that takes long."""


class Order:
    """Sessions by number. ``at_once``: how many are read at once."""

    def __init__(self, paths: Sequence[str], at_once: int) -> None:
        self._paths = paths
        self._ahead = AHEAD * at_once
        self._next = 0
        self._again: deque[int] = deque()
        self._taken = 0
        self._waiting: dict[int, Read] = {}

    def hand_out(self) -> int | None:
        """The number of the next session to read; None where none may be begun now."""
        if self._again:
            return self._again.popleft()
        if self._next >= min(len(self._paths), self._taken + self._ahead):
            return None
        self._next += 1
        return self._next - 1

    def path(self, number: int) -> str:
        return self._paths[number]

    def again(self, number: int) -> None:
        """This session is to be read again."""
        self._again.append(number)

    def done(self, number: int, read: Read) -> None:
        """This session has been read."""
        self._waiting[number] = read

    def take(self) -> Iterator[Read]:
        """What was read and has its turn now."""
        while self._taken in self._waiting:
            yield self._waiting.pop(self._taken)
            self._taken += 1

    @property
    def is_over(self) -> bool:
        return self._taken == len(self._paths)
