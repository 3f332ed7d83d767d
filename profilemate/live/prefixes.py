# SPDX-License-Identifier: Apache-2.0
"""Which prefixes did requests find most in the last minute?

requests.jsonl has the contents of a request's prompt and how many tokens the lookup found that led
to its admission, once the request has ended. So these are the prefixes that the requests found that
ended in the last minute. They are divided into stretches, as ``analysis.prefix.sharing`` does:
consecutive blocks that the same requests found. So each token that was found counts in one stretch.

The contents are kept as a tree, whose nodes are runs of blocks. Equal contents have equal contents
before them, so two prompts are alike up to a block if that block is alike.
"""

from __future__ import annotations

import heapq
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from analysis.tables.schema import LONGEST_SEC
from profilemate.live.tails import FIRST_BYTES, Tail

WINDOW_SEC = 60.0

SHOWN = 10
"""How many of each engine are named."""

MOST_HITS = 10_000
MOST_BLOCKS = 1_000_000
"""Requests, and blocks of the tree, that are kept at most. Where there are more, the oldest go, and
the figures are of less than a minute."""


@dataclass(frozen=True)
class Prefix:
    """A stretch of prompts: the tokens from ``begin_token`` to ``end_token``, which ``found``
    requests found in the prefix cache.

    ``content_id``: of the last block; it stands for the prompt up to there. ``saved_tokens``: that
    these requests did not have to compute, in whole blocks. ``first_sec``, ``last_sec``: when the
    first and the last of them were admitted, in seconds of the session.
    """

    engine: int
    content_id: int
    begin_token: int
    end_token: int
    blocks: int
    found: int
    saved_tokens: int
    first_sec: float
    last_sec: float


@dataclass(frozen=True)
class Hottest:
    """``prefixes``: of each engine the ``SHOWN`` that saved most tokens, the most first.
    ``requests``: those that found something and ended in the last ``seconds``, which end now."""

    seconds: float
    requests: int
    prefixes: tuple[Prefix, ...]


class _Node:
    """Consecutive blocks that follow those of ``parent``. ``found``: requests that found them
    all."""

    __slots__ = ("blocks", "children", "found", "parent")

    def __init__(self, blocks: array[int], parent: _Node | None, found: int = 0) -> None:
        self.blocks = blocks
        self.parent = parent
        self.found = found
        self.children: dict[int, _Node] = {}
        """By their first block."""


class _Hit(NamedTuple):
    """A request that found something, by the time of its end. ``number`` tells those of one moment
    apart; ``last`` is the node of the last block that it found."""

    finish_sec: float
    number: int
    admitted_sec: float
    last: _Node


class _Stretch(NamedTuple):
    """The blocks from ``begin`` to ``end`` of some prompts, of which ``node`` has the last one,
    ``content_id``. What saved most is smallest."""

    less_saved: int
    """Blocks, below 0."""
    less_found: int
    begin: int
    content_id: int
    end: int
    node: _Node


class _Row(NamedTuple):
    """A request that has ended. ``blocks``: the contents that it found."""

    engine: int
    block_size: int
    blocks: array[int]
    admitted_sec: float
    finish_sec: float


class Prefixes:
    """Follows requests.jsonl of one session."""

    def __init__(self, session: Path, *, first_bytes: int = FIRST_BYTES) -> None:
        self._ends = Tail(session, "requests", first_bytes=first_bytes)
        self._since = 0.0
        """All requests that ended later have been seen."""
        self._until = 0.0
        self._trees: dict[tuple[int, int], _Node] = {}
        """By engine and block size."""
        self._hits: list[_Hit] = []
        """A heap."""
        self._number = 0
        self._blocks = 0

    def close(self) -> None:
        """Let go of the table."""
        self._ends.close()

    def look(self, until_sec: float) -> None:
        """Take in what is new. ``until_sec``: time of the last event, in seconds of the session."""
        rows = [row for row in map(_row, self._ends.new_lines()) if row is not None]
        self._until = max([self._until, until_sec, *(row.finish_sec for row in rows)])
        if self._ends.gap:
            # Rows are missing before the first of these.
            self._since = rows[0].finish_sec if rows else self._until
        self._since = max(self._since, self._until - WINDOW_SEC)
        for row in rows:
            if row.blocks and row.finish_sec > self._since:
                self._number += 1
                hit = _Hit(row.finish_sec, self._number, row.admitted_sec, self._add(row))
                heapq.heappush(self._hits, hit)
        self._forget()
        while len(self._hits) > MOST_HITS or self._blocks > MOST_BLOCKS:
            self._since = self._hits[0].finish_sec
            self._forget()

    def hottest(self) -> Hottest:
        """What was found most."""
        shown = [
            (engine, size, stretch)
            for (engine, size), root in sorted(self._trees.items())
            for stretch in heapq.nsmallest(SHOWN, _stretches(root))
        ]
        times: dict[_Node, list[float]] = {stretch.node: [] for *_, stretch in shown}
        for hit in self._hits:
            node: _Node | None = hit.last
            while node is not None:
                if node in times:
                    times[node].append(hit.admitted_sec)
                node = node.parent
        return Hottest(
            seconds=self._until - self._since,
            requests=len(self._hits),
            prefixes=tuple(
                Prefix(
                    engine=engine,
                    content_id=stretch.content_id,
                    begin_token=stretch.begin * size,
                    end_token=stretch.end * size,
                    blocks=stretch.end - stretch.begin,
                    found=stretch.node.found,
                    saved_tokens=-stretch.less_saved * size,
                    first_sec=min(times[stretch.node]),
                    last_sec=max(times[stretch.node]),
                )
                for engine, size, stretch in shown
            ),
        )

    def _forget(self) -> None:
        """Forget the requests that ended too long ago."""
        while self._hits and self._hits[0].finish_sec <= self._since:
            node = heapq.heappop(self._hits).last
            while node.parent is not None:
                node.found -= 1
                if not node.found:
                    del node.parent.children[node.blocks[0]]
                    self._blocks -= len(node.blocks)
                node = node.parent

    def _add(self, row: _Row) -> _Node:
        """Put what a request found into the tree; returns the node of the last block."""
        node = self._trees.setdefault((row.engine, row.block_size), _Node(array("Q"), None))
        left = row.blocks
        while left:
            child = node.children.get(left[0])
            if child is None:
                child = node.children[left[0]] = _Node(left, node)
                self._blocks += len(left)
            same = _alike(child.blocks, left)
            if same < len(child.blocks):
                child = _split(child, same)
            child.found += 1
            node, left = child, left[same:]
        return node


def _alike(one: array[int], other: array[int]) -> int:
    """How many blocks two prompts have in common here."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return bisect_left(range(most), True, key=lambda place: one[place] != other[place])


def _split(node: _Node, at: int) -> _Node:
    """Give the first blocks of a node a node of their own, which is returned."""
    above = _Node(node.blocks[:at], node.parent, node.found)
    assert node.parent is not None
    node.parent.children[node.blocks[0]] = above
    node.blocks, node.parent = node.blocks[at:], above
    above.children[node.blocks[0]] = node
    return above


def _stretches(root: _Node) -> Iterator[_Stretch]:
    """All stretches of a tree."""
    waiting = [(child, 0) for child in root.children.values()]
    while waiting:
        node, begin = waiting.pop()
        end = begin + len(node.blocks)
        # One that all requests went on to is the same stretch.
        while len(node.children) == 1:
            (child,) = node.children.values()
            if child.found != node.found:
                break
            node, end = child, end + len(child.blocks)
        found = node.found
        yield _Stretch((begin - end) * found, -found, begin, node.blocks[-1], end, node)
        waiting += [(child, end) for child in node.children.values()]


# A client's text is only in the request's id: in JSON a quote within it has a backslash before it.
_ROW = re.compile(
    rb'\{"timestamp":(?P<arrived>-?[0-9.]{1,20}),"input_length":\d+,"output_length":\d+,'
    rb'"hash_ids":\[(?P<contents>[0-9,]*)\],"block_size":(?P<size>\d{1,9}),'
    rb'"request_id":"(?:[^"\\]|\\.)*","engine":(?P<engine>\d{1,9}),'
    rb'"output_hash_ids":\[[0-9,]*\],"hit_tokens":(?P<hit>\d{1,15}),[^{}]*?'
    rb'"queue_sec":(?P<queue>[0-9.e-]{1,20}),[^{}]*?"finish_sec":(?P<finish>[0-9.]{1,20}),'
)


def _row(line: bytes) -> _Row | None:
    """What a row of requests.jsonl says of a request that was admitted; None where it is damaged.
    Without contents where it found no whole block."""
    found = _ROW.match(line)
    if found is None:
        return None
    try:
        size = int(found["size"])
        count = int(found["hit"]) // size
        contents = array("Q", map(int, found["contents"].split(b",", count)[:count]))
        admitted = float(found["arrived"]) / 1e3 + float(found["queue"])
        finish = float(found["finish"])
    except (ValueError, OverflowError, ZeroDivisionError):
        return None
    is_whole = len(contents) == count and 0 < finish < LONGEST_SEC
    return _Row(int(found["engine"]), size, contents, admitted, finish) if is_whole else None
