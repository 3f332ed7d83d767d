# SPDX-License-Identifier: Apache-2.0
"""Write the requests that have ended: rows of requests.jsonl.

A request gives its blocks up after it has ended, in the same episode. So its row is written at the
episode's end, when they have been counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from profilemate.collector.requests import Finish, Request, prefix_ids, row
from profilemate.collector.tables import Append

_ONCE_SHIFT = 32
"""Above these bits the number of a content that occurs once has its engine's rank."""


class _Ended(NamedTuple):
    request: Request
    finish: Finish
    prompt_ids: list[str]
    output_ids: list[str]
    prefixes: list[str]


class Endings:
    """The requests of one engine that have ended and are not in the table yet.

    Args:
        rank: the engine's.
        origin_ns: second 0 of the session.
        block_size: tokens that one content id stands for.
        prefix_unit: prefixes that end at a multiple of this many tokens have the ids of contents;
            0: none have.
        caching: whether blocks have contents at all.
        once: makes the id of a content that occurs once out of a number.
        append: takes a row.

    ``used_once`` counts the content ids that occur once so far.
    """

    def __init__(
        self,
        rank: int,
        origin_ns: int,
        *,
        block_size: int,
        prefix_unit: int,
        caching: bool,
        once: Callable[[int], str],
        append: Append,
    ) -> None:
        self._rank = rank
        self._origin = origin_ns
        self._block_size = block_size
        self._prefix_unit = prefix_unit
        self._caching = caching
        self._once = once
        self._append = append
        self._ended: list[_Ended] = []
        self.used_once = 0

    def __bool__(self) -> bool:
        return bool(self._ended)

    def add(self, request: Request, finish: Finish, contents: list[str]) -> None:
        """The request has ended; ``contents`` are those of its full blocks."""
        arrived_with, request.prompt_tokens = request.prompt_tokens, finish.prompt_tokens
        prompt_ids, output_ids = self._content_ids(request, finish, contents)
        full = prompt_ids[: finish.prompt_tokens // self._block_size]
        prefixes = prefix_ids(request, arrived_with, self._prefix_unit, full)
        request.freed_blocks = 0
        self._ended.append(_Ended(request, finish, prompt_ids, output_ids, prefixes))

    def forget(self) -> None:
        """Write none of them: how they ended is not known."""
        self._ended.clear()

    def write(self, lost: Collection[str]) -> Iterator[tuple[Request, Finish]]:
        """Write the rows of all of them, and hand each out once its row is written, with its end.
        One that came before the recording went on has no row.

        ``lost`` are the parts of the recording that have ended, whose fields are null.
        """
        ended, self._ended = self._ended, []
        for request, finish, prompt_ids, output_ids, prefixes in ended:
            if not request.freed_blocks:
                request.freed_blocks = request.num_blocks
            if not request.came_before:
                self._append(
                    row(
                        request,
                        finish,
                        self._rank,
                        self._origin,
                        self._block_size,
                        prompt_ids,
                        output_ids,
                        prefixes,
                        lost,
                    )
                )
            yield request, finish

    def _content_ids(
        self, request: Request, finish: Finish, contents: list[str]
    ) -> tuple[list[str], list[str]]:
        """Content ids of the prompt's blocks, the last partial one included, and of the full
        blocks that follow."""
        if not self._caching:
            return [], []
        size = self._block_size
        full = request.prompt_tokens // size
        prompt_ids = contents[:full]
        while len(prompt_ids) * size < request.prompt_tokens:
            self.used_once += 1
            prompt_ids.append(self._once(self._rank << _ONCE_SHIFT | self.used_once))
        # The last token's own KV is never there, and what was not computed is nowhere.
        tokens = min(finish.computed_tokens, request.prompt_tokens + finish.output_tokens - 1)
        return prompt_ids, contents[full : max(full, tokens // size)]
