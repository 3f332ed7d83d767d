# SPDX-License-Identifier: Apache-2.0
"""The state of one block pool, rebuilt from its events.

Every block is held (by a request), cached (held by none, its content reusable) or free. Times
are nanoseconds of the monotonic clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from profilemate.collector.decode import ImpossibleError

PROMPT, OUTPUT = "prompt", "output"
NOT_KNOWN = ""
"""The origin of a content that was there when the recording went on after a pause."""

NEVER = -1
"""A time that is not known, as it lies before that. So is the number of reuses: ``MANY`` less than
none, so that those that follow do not make it a number."""
MANY = 1 << 40
NO_GROUP = -1
"""The group of a block of which nothing says which one it is."""

Life = tuple[int, int, int | None, int, str, int, str]
"""A block since its allocation: when that was, when it was last allocated or reused, when its last
holder let go (None while it is held), how often it was reused, the cell of its last holder's id,
its group, and where its content came from.

Blocks with the same history share one, so identity says which neighbours have it."""

Loss = tuple[Life, int, list[int], list[str]]
"""Contents that were lost together: the life that their blocks share, how many other blocks still
have each content, the blocks in the order in which they lost it, and the contents."""

_NEW: Life = (0, 0, None, 0, "", 0, PROMPT)


def _life_before(owner: str, group: int, freed: int | None) -> Life:
    """Of a block that was there when the recording went on."""
    return NEVER, NEVER, freed, -MANY, owner, group, NOT_KNOWN


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
        self._holders = [0] * blocks
        self._lives = [_NEW] * blocks
        self._copies: defaultdict[int, dict[str, int]] = defaultdict(dict)
        """How many blocks hold each content, by group."""

    @property
    def num_free(self) -> int:
        """Blocks that no request holds and whose content, if any, is lost."""
        return self.total - self.num_held - self.num_cached

    def saved(self) -> dict[str, Any]:
        """All of it, as JSON. Each life is there once, so that blocks go on sharing theirs."""
        lives = {id(life): life for life in self._lives}
        places = {identity: place for place, identity in enumerate(lives)}
        return {
            "held": self.num_held,
            "cached": self.num_cached,
            "contents": self.contents,
            "holders": self._holders,
            "lives": list(lives.values()),
            "life_of": [places[id(life)] for life in self._lives],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Be as when it was ``saved``."""
        self.num_held, self.num_cached = saved["held"], saved["cached"]
        self.contents, self._holders = saved["contents"], saved["holders"]
        lives: list[Life] = [tuple(life) for life in saved["lives"]]
        self._lives = [lives[place] for place in saved["life_of"]]
        self._copies.clear()
        for content, life in zip(self.contents, self._lives, strict=True):
            if content is not None:
                copies = self._copies[life[5]]
                copies[content] = copies.get(content, 0) + 1

    def begin_again(
        self,
        held: list[int],
        again: list[int],
        cached: list[tuple[int, list[int], list[str]]],
        owners: Iterable[tuple[str, int, list[int]]],
        of_others: int,
    ) -> None:
        """How the blocks are from now on; what they were before is forgotten.

        Args:
            held: the blocks that have a holder.
            again: a block once more for each further holder.
            cached: for each group the blocks with a content, and their contents.
            owners: cell, group and blocks of each request, as far as they are known.
            of_others: the group of blocks without content that are none of these.

        """
        blocks = len(self.contents)
        self.contents, self._holders = [None] * blocks, [0] * blocks
        self._copies.clear()
        life = _life_before("", of_others, NEVER)
        self._lives = [life] * blocks
        life = _life_before("", of_others, None)
        for block in held:
            self._holders[block], self._lives[block] = 1, life
        for cell, group, of_request in owners:
            life = _life_before(cell, group, None)
            for block in of_request:
                if self._holders[block]:
                    self._lives[block] = life
        for block in again:
            self._holders[block] += 1
        for group, with_content, contents in cached:
            copies = self._copies[group]
            life = _life_before("", group, NEVER)
            for block, content in zip(with_content, contents, strict=True):
                self.contents[block] = content
                copies[content] = copies.get(content, 0) + 1
                if not self._holders[block]:
                    self._lives[block] = life
                elif self._lives[block][5] != group:
                    self._lives[block] = _life_before(self._lives[block][4], group, None)
        self.num_held = sum(map(bool, self._holders))
        has_content = sum(content is not None for content in self.contents)
        both = zip(self.contents, self._holders, strict=True)
        self.num_cached = has_content - sum(
            content is not None and holders > 0 for content, holders in both
        )
        if self.num_held != len(held) or has_content != sum(len(each[1]) for each in cached):
            raise ImpossibleError("a block is named twice where the recording goes on")

    def count(self, blocks: list[int]) -> int:
        """How many of the blocks are not the null block."""
        return len(blocks) - blocks.count(self.null)

    def leading_contents(self, blocks: list[int]) -> list[str]:
        """The contents of the blocks up to the first that has none."""
        contents_of = self.contents
        contents = [contents_of[block] or "" for block in blocks]
        return contents if all(contents) else contents[: contents.index("")]

    def owner(self, block: int) -> tuple[str, int]:
        """The cell of the request that holds the block, or held it last, and the block's group."""
        life = self._lives[block]
        return life[4], life[5]

    def allocate(self, blocks: list[int], owner: str, group: int, time: int) -> None:
        """Hand blocks without content to a request."""
        holders, lives = self._holders, self._lives
        life = (time, time, None, 0, owner, group, PROMPT)
        self.num_held += len(blocks)
        for block in blocks:
            lives[block] = life
            if holders[block]:
                raise ImpossibleError(f"block {block:,} was handed out while a request held it")
            holders[block] = 1

    def reuse(self, blocks: list[int], owner: str, time: int) -> list[tuple[int, int]]:
        """A request takes up blocks that are cached, or that others hold, too.

        ``owner`` is the request's cell; empty: that of the block's last holder. Returns when the
        blocks were last used, and how many of them then.
        """
        holders, lives = self._holders, self._lives
        old, new = None, _NEW
        used: list[tuple[int, int]] = []
        accessed = first = 0
        for at, block in enumerate(blocks):
            if block == self.null:
                if old is not None:
                    used.append((accessed, at - first))
                    old = None
                continue
            if not holders[block]:
                self.num_held += 1
                self.num_cached -= self.contents[block] is not None
            holders[block] += 1
            life = lives[block]
            if life is not old:
                if old is not None:
                    used.append((accessed, at - first))
                old, first = life, at
                allocated, accessed, _, reuses, before, group, origin = life
                new = (allocated, time, None, reuses + 1, owner or before, group, origin)
            lives[block] = new
        if old is not None:
            used.append((accessed, len(blocks) - first))
        return used

    def drop(self, blocks: list[int], owner: str, time: int) -> list[int]:
        """A request lets go of these; returns the blocks that no other holds.

        ``owner`` is the request's cell; empty: that of the block's last holder.
        """
        holders = self._holders
        if max([holders[block] for block in blocks], default=0) > 1:
            last = []
            for block in blocks:
                if holders[block] > 1:
                    holders[block] -= 1
                else:
                    last.append(block)
            blocks = last
        return self.free(blocks, owner, time)

    def drop_one_holder(self, blocks: Iterable[int]) -> None:
        """One of several holders of each block let go."""
        holders = self._holders
        for block in blocks:
            if holders[block] > 1:
                holders[block] -= 1

    def free(self, blocks: Iterable[int], owner: str, time: int) -> list[int]:
        """The last holder of each block let go; returns the blocks that were held."""
        holders, lives, contents = self._holders, self._lives, self.contents
        released = []
        cached = 0
        old, new = None, _NEW
        for block in blocks:
            # vLLM may name one twice (a content that ends inside a block), or a null block.
            if not holders[block]:
                continue
            holders[block] = 0
            released.append(block)
            if contents[block] is not None:
                cached += 1
            life = lives[block]
            if life is not old:
                old = life
                allocated, accessed, _, reuses, before, group, origin = life
                new = (allocated, accessed, time, reuses, owner or before, group, origin)
            lives[block] = new
        self.num_held -= len(released)
        self.num_cached += cached
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
        """The blocks have these contents from now on, which a lookup can find.

        The first content ends after ``tokens`` of its request's tokens, each other ``stride``
        after the one before. A content that ends within the prompt is the prompt's.
        """
        count = len(blocks)
        if tokens + (count - 1) * stride <= prompt_tokens:
            self._cache(blocks, contents, group, PROMPT)
        elif tokens > prompt_tokens:
            self._cache(blocks, contents, group, OUTPUT)
        else:
            of_prompt = (prompt_tokens - tokens) // stride + 1
            self._cache(blocks[:of_prompt], contents[:of_prompt], group, PROMPT)
            self._cache(blocks[of_prompt:], contents[of_prompt:], group, OUTPUT)

    def _cache(self, blocks: list[int], contents: list[str], group: int, origin: str) -> None:
        holders, lives, contents_of = self._holders, self._lives, self.contents
        copies = self._copies[group]
        old, new = None, _NEW
        for block, content in zip(blocks, contents, strict=True):
            if contents_of[block] is not None:
                self._drop_copy(block)
            elif not holders[block]:
                self.num_cached += 1
            contents_of[block] = content
            if content in copies:
                copies[content] += 1
            else:
                copies[content] = 1
            life = lives[block]
            if life is not old:
                old = life
                new = (*life[:5], group, origin)
            lives[block] = new

    def evict(self, blocks: Iterable[int]) -> list[Loss]:
        """The blocks lose their contents, where they have one."""
        contents, lives, holders = self.contents, self._lives, self._holders
        losses: list[Loss] = []
        free = 0
        old, copies_before = None, 1
        for block in blocks:
            content = contents[block]
            if content is None:
                continue
            contents[block] = None
            if not holders[block]:
                free += 1
            life = lives[block]
            if life is not old:
                copies = self._copies[life[5]]
            count = copies.pop(content)
            if count > 1:
                copies[content] = count - 1
            if life is not old or count != copies_before:
                old, copies_before = life, count
                lost_by: list[int] = []
                lost: list[str] = []
                losses.append((life, count - 1, lost_by, lost))
            lost_by.append(block)
            lost.append(content)
        self.num_cached -= free
        return losses

    def evict_all(self) -> list[Loss]:
        """All blocks lose their contents at once, so no copy of any is left."""
        losses = self.evict(range(len(self.contents)))
        return [(life, 0, blocks, contents) for life, _, blocks, contents in losses]

    def move(self, source: int, target: int) -> None:
        """The content is in another block from now on; nothing is lost."""
        content = self.contents[source]
        if content is None:
            return
        *_, group, origin = self._lives[source]
        self._drop_copy(source)
        self.contents[source] = None
        self.num_cached -= not self._holders[source]
        self._cache([target], [content], group, origin)

    def _drop_copy(self, block: int) -> None:
        content = self.contents[block]
        if content is None:
            return
        copies = self._copies[self._lives[block][5]]
        left = copies.pop(content) - 1
        if left:
            copies[content] = left
