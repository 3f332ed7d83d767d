# SPDX-License-Identifier: Apache-2.0
"""Which contents had to be computed again because a pool had lost them?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import islice
from typing import Any

from profilemate.collector.blocks import Loss


class Regrets:
    """The contents that one pool lost last, as their room was needed, by group: as many as the pool
    has blocks. A pool of twice the size would have most of them."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._lost: defaultdict[int, dict[str, None]] = defaultdict(dict)

    def lose(self, losses: Iterable[Loss]) -> None:
        """These contents were lost; those of which a copy is left are not."""
        for life, copies_left, _, contents in losses:
            if not copies_left:
                lost = self._lost[life[5]]
                lost.update(dict.fromkeys(contents))
                for content in list(islice(lost, max(0, len(lost) - self._most))):
                    del lost[content]

    def cache(self, group: int, contents: list[str]) -> int:
        """Blocks have these contents now; returns how many of them had been lost."""
        lost = self._lost.get(group)
        if not lost or lost.keys().isdisjoint(contents):
            return 0
        again = [content for content in contents if content in lost]
        for content in again:
            lost.pop(content, None)
        return len(again)

    def forget(self) -> None:
        """What was lost would not be there any more, whatever the pool's size."""
        self._lost.clear()

    def saved(self) -> Any:
        """All of it, as JSON."""
        return [[group, list(lost)] for group, lost in self._lost.items()]

    def restore(self, saved: Any) -> None:
        """Be as when it was ``saved``."""
        self._lost.clear()
        self._lost.update({group: dict.fromkeys(lost) for group, lost in saved})
