# SPDX-License-Identifier: Apache-2.0
"""The state of one block pool, replayed from its events.

Every block is held (by a request), cached (held by none, its content reusable) or free. Times
are nanoseconds of the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

PROMPT, OUTPUT = "prompt", "output"


@dataclass(frozen=True, slots=True)
class Eviction:
    """One cached block that lost its content. ``owner`` is the cell of its last holder's id."""

    time: int
    lifetime: int
    idle: int
    evictable: int | None
    block: int
    reuse_count: int
    content: int
    copies_left: int
    origin: str
    owner: str
    group: int


class Pool:
    """``total`` blocks besides the null block; ``content`` of a block is None or its number."""

    def __init__(self, blocks: int, null: int | None) -> None:
        self.null = null
        self.total = blocks - (null is not None)
        self.num_held = 0
        self.num_cached = 0
        self.contents: list[int | None] = [None] * blocks
        self.groups = [0] * blocks
        self._held = bytearray(blocks)
        self._holders = [0] * blocks
        self._allocated = [0] * blocks
        self._accessed = [0] * blocks
        self._freed = [0] * blocks
        self._reuses = [0] * blocks
        self._origins = [PROMPT] * blocks
        self._owners = [""] * blocks
        self._copies: dict[tuple[int, int], int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no request holds and whose content, if any, is lost."""
        return self.total - self.num_held - self.num_cached

    def owner(self, block: int) -> str:
        """Cell of the request that holds the block, or held it last."""
        return self._owners[block]

    def allocate(
        self, blocks: list[int], owners: list[tuple[str, int]], time: int
    ) -> list[Eviction]:
        """Hand blocks out; ``owners`` has each one's request cell and group."""
        evictions = []
        for block, (owner, group) in zip(blocks, owners, strict=True):
            if self.contents[block] is not None:
                evictions.append(self.evict(block, time))
            self._hold(block, owner)
            self.groups[block] = group
            self._allocated[block] = self._accessed[block] = time
            self._reuses[block] = 0
        return evictions

    def reuse(self, blocks: Iterable[int], owner: str, time: int) -> int:
        """Take cached or shared blocks up again; returns how many.

        ``owner`` is the cell of the request that does; empty: it is who held the block last.
        """
        count = 0
        for block in blocks:
            if block != self.null:
                self._hold(block, owner or self._owners[block])
                self._accessed[block] = time
                self._reuses[block] += 1
                count += 1
        return count

    def drop(self, blocks: Iterable[int], owner: str, time: int) -> list[int]:
        """Drop a reference to each; returns the blocks whose last holder let go.

        ``owner`` is the cell of the request that lets go; empty: it is who held the block last.
        """
        released = []
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                released.append(block)
        return self.free(released, owner, time)

    def free(self, blocks: Iterable[int], owner: str, time: int) -> list[int]:
        """The last holder of each of these let go; returns those that were held."""
        released = []
        for block in blocks:
            if block == self.null or not self._held[block]:
                continue
            self._held[block] = 0
            self._holders[block] = 0
            self.num_held -= 1
            if self.contents[block] is not None:
                self.num_cached += 1
            if owner:
                self._owners[block] = owner
            self._freed[block] = time
            released.append(block)
        return released

    def cache(self, block: int, content: int, origin: str, group: int) -> None:
        """The block's content became reusable, or grew to be this one."""
        old = self.contents[block]
        if old is not None:
            self._drop_copy(self.groups[block], old)
        elif not self._held[block]:
            self.num_cached += 1
        self.contents[block] = content
        self.groups[block] = group
        self._origins[block] = origin
        key = (group, content)
        self._copies[key] = self._copies.get(key, 0) + 1

    def evict(self, block: int, time: int) -> Eviction:
        """The block's content is lost; it must have one."""
        content = self.contents[block]
        assert content is not None
        group = self.groups[block]
        copies_left = self._drop_copy(group, content)
        self.contents[block] = None
        if not self._held[block]:
            self.num_cached -= 1
        return Eviction(
            time=time,
            lifetime=time - self._allocated[block],
            idle=time - self._accessed[block],
            evictable=None if self._held[block] else time - self._freed[block],
            block=block,
            reuse_count=self._reuses[block],
            content=content,
            copies_left=copies_left,
            origin=self._origins[block],
            owner=self._owners[block],
            group=group,
        )

    def evict_all(self, time: int) -> list[Eviction]:
        """Every content is lost at once, so no copy is left of any."""
        return [
            replace(self.evict(block, time), copies_left=0)
            for block, content in enumerate(self.contents)
            if content is not None
        ]

    def move(self, source: int, target: int) -> None:
        """The content now lives in another block; nothing is lost."""
        content = self.contents[source]
        if content is None:
            return
        group, origin = self.groups[source], self._origins[source]
        self._drop_copy(group, content)
        self.contents[source] = None
        if not self._held[source]:
            self.num_cached -= 1
        self.cache(target, content, origin, group)

    def _hold(self, block: int, owner: str) -> None:
        if not self._held[block]:
            self._held[block] = 1
            self.num_held += 1
            if self.contents[block] is not None:
                self.num_cached -= 1
        self._holders[block] += 1
        self._owners[block] = owner

    def _drop_copy(self, group: int, content: int) -> int:
        key = (group, content)
        left = self._copies[key] - 1
        if left:
            self._copies[key] = left
        else:
            del self._copies[key]
        return left
