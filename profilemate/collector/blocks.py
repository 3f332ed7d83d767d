# SPDX-License-Identifier: Apache-2.0
"""The state of one block pool, replayed from its events.

Every block is held (by a request), cached (held by none, its content reusable) or free. Times
are nanoseconds of the monotonic clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

PROMPT, OUTPUT = "prompt", "output"


class Life(NamedTuple):
    """What has become of a block since it was handed out. Blocks that it came to alike share it.

    ``freed`` is None while the block is held; ``owner`` is the cell of its last holder's id.
    """

    allocated: int
    accessed: int
    freed: int | None
    reuses: int
    owner: str


class Loss(NamedTuple):
    """Contents that were lost alike, each with its block, in the order in which they went."""

    life: Life
    copies_left: int
    origin: str
    group: int
    lost: list[tuple[int, str]]


class Pool:
    """``total`` blocks besides the null block; ``contents`` of a block is None or its id.

    The null block is never held.
    """

    def __init__(self, blocks: int, null: int | None) -> None:
        self.null = -1 if null is None else null
        self.total = blocks - (null is not None)
        self.num_held = 0
        self.num_cached = 0
        self.contents: list[str | None] = [None] * blocks
        self.groups = [0] * blocks
        self._holders = [0] * blocks
        self._lives = [Life(0, 0, None, 0, "")] * blocks
        self._origins = [PROMPT] * blocks
        self._copies: defaultdict[int, dict[str, int]] = defaultdict(dict)
        """How many blocks hold each content, by group."""

    @property
    def num_free(self) -> int:
        """Blocks that no request holds and whose content, if any, is lost."""
        return self.total - self.num_held - self.num_cached

    def count(self, blocks: list[int]) -> int:
        """How many of the blocks are not the null block."""
        return len(blocks) - blocks.count(self.null)

    def known_contents(self, blocks: list[int]) -> list[str]:
        """The contents of the blocks up to the first that has none."""
        contents = []
        for block in blocks:
            content = self.contents[block]
            if content is None:
                break
            contents.append(content)
        return contents

    def owner(self, block: int) -> str:
        """Cell of the request that holds the block, or held it last."""
        return self._lives[block].owner

    def allocate(self, blocks: Iterable[int], owner: str, group: int, time: int) -> None:
        """Hand blocks without content out to a request."""
        holders, lives, groups = self._holders, self._lives, self.groups
        life = Life(time, time, None, 0, owner)
        for block in blocks:
            if not holders[block]:
                self.num_held += 1
            holders[block] += 1
            groups[block] = group
            lives[block] = life

    def reuse(self, blocks: Iterable[int], owner: str, time: int) -> None:
        """Take cached or shared blocks up again.

        ``owner`` is the cell of the request that does; empty: it is who held the block last.
        """
        holders, lives = self._holders, self._lives
        old = new = None
        for block in blocks:
            if block == self.null:
                continue
            if not holders[block]:
                self.num_held += 1
                self.num_cached -= self.contents[block] is not None
            holders[block] += 1
            life = lives[block]
            if new is None or life is not old:
                old = life
                new = Life(life.allocated, time, None, life.reuses + 1, owner or life.owner)
            lives[block] = new

    def drop(self, blocks: Iterable[int], owner: str, time: int) -> list[int]:
        """Drop a reference to each; returns the blocks whose last holder let go.

        ``owner`` is the cell of the request that lets go; empty: it is who held the block last.
        """
        holders = self._holders
        last = []
        for block in blocks:
            if holders[block] > 1:
                holders[block] -= 1
            else:
                last.append(block)
        return self.free(last, owner, time)

    def share_less(self, blocks: Iterable[int]) -> None:
        """One of several holders of each of these let go."""
        holders = self._holders
        for block in blocks:
            if holders[block] > 1:
                holders[block] -= 1

    def free(self, blocks: Iterable[int], owner: str, time: int) -> list[int]:
        """The last holder of each of these let go; returns those that were held."""
        holders, lives, contents = self._holders, self._lives, self.contents
        released = []
        old = new = None
        for block in blocks:
            if not holders[block]:
                continue
            holders[block] = 0
            released.append(block)
            if contents[block] is not None:
                self.num_cached += 1
            life = lives[block]
            if new is None or life is not old:
                old = life
                allocated, accessed, _, reuses, before = life
                new = Life(allocated, accessed, time, reuses, owner or before)
            lives[block] = new
        self.num_held -= len(released)
        return released

    def cache(
        self,
        blocks: list[int],
        contents: list[str],
        group: int,
        prompt_tokens: int,
        tokens: int,
        stride: int,
    ) -> None:
        """The blocks' contents became reusable, or grew to be these.

        The first content ends after ``tokens`` of its request's tokens, each other ``stride``
        after the one before; what ends within the prompt comes from it.
        """
        holders, known, groups, origins = self._holders, self.contents, self.groups, self._origins
        copies = self._copies[group]
        for block, content in zip(blocks, contents, strict=True):
            old = known[block]
            if old is not None:
                self._drop_copy(groups[block], old)
            elif not holders[block]:
                self.num_cached += 1
            known[block] = content
            groups[block] = group
            origins[block] = PROMPT if tokens <= prompt_tokens else OUTPUT
            copies[content] = copies.get(content, 0) + 1
            tokens += stride

    def evict(self, blocks: Iterable[int]) -> list[Loss]:
        """The contents of those of the blocks that have one are lost."""
        contents, lives, holders = self.contents, self._lives, self._holders
        groups, origins, copies = self.groups, self._origins, self._copies
        losses: list[Loss] = []
        last = None
        for block in blocks:
            content = contents[block]
            if content is None:
                continue
            contents[block] = None
            if not holders[block]:
                self.num_cached -= 1
            group = groups[block]
            left = copies[group].pop(content) - 1
            if left:
                copies[group][content] = left
            alike = (lives[block], left, origins[block], group)
            if alike != last:
                last = alike
                lost: list[tuple[int, str]] = []
                losses.append(Loss(*alike, lost))
            lost.append((block, content))
        return losses

    def evict_all(self) -> list[Loss]:
        """Every content is lost at once, so no copy is left of any."""
        losses = self.evict(range(len(self.contents)))
        return [loss._replace(copies_left=0) for loss in losses]

    def move(self, source: int, target: int) -> None:
        """The content now lives in another block; nothing is lost."""
        content = self.contents[source]
        if content is None:
            return
        group, origin = self.groups[source], self._origins[source]
        self._drop_copy(group, content)
        self.contents[source] = None
        self.num_cached -= not self._holders[source]
        self.cache([target], [content], group, 0, 0, 0)
        self._origins[target] = origin

    def _drop_copy(self, group: int, content: str) -> None:
        copies = self._copies[group]
        left = copies.pop(content) - 1
        if left:
            copies[content] = left
