# SPDX-License-Identifier: Apache-2.0
"""Which request got each block that a step handed out?

vLLM's pool does not know, and the step's output says it only at the step's end. So the events of a
step are searched, from the last one back, before they are applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, product

from profilemate.collector.decode import Episode, events_of
from profilemate.collector.requests import Request
from profilemate.format.events import Op

Owner = tuple[int, int]
"""A request's number and the group, which is -1 where it is not known."""

NOBODY: Owner = (-1, 0)

Parts = list[tuple[Owner, list[int]]]
"""The blocks of one ALLOCATE by owner, neighbours with the same one together."""

_LOOKUP, _ALLOCATE, _REUSE = int(Op.LOOKUP), int(Op.ALLOCATE), int(Op.REUSE)
_FREE, _ASSIGN, _TABLE = int(Op.FREE), int(Op.ASSIGN), int(Op.TABLE)
_ADMIT, _ADMIT_LOOKED_UP = int(Op.ADMIT), int(Op.ADMIT_LOOKED_UP)

SETTLED = frozenset((Op.ALLOCATE, Op.ASSIGN, Op.TABLE, Op.ADMIT, Op.ADMIT_LOOKED_UP))
"""Where an episode has none of these, there is nothing to ``settle``."""


def settle(
    episode: Episode, requests: Mapping[int, Request], group_pools: Sequence[int], pools: int
) -> tuple[list[Parts], int]:
    """Bring the requests' block tables up to date, and find who got the new blocks.

    Args:
        episode: the events of a step.
        requests: those that have not ended, by number.
        group_pools: the pool of each KV cache group.
        pools: how many pools there are.

    Returns:
        The owners of the blocks of each ALLOCATE, the last one first; and how many requests
        have another number of blocks than the engine counted.

    """
    ops = episode.ops
    has_tables = _ASSIGN in ops or _ADMIT in ops or _TABLE in ops
    if has_tables:
        _update_tables(episode, requests, len(group_pools))
    owners: list[Parts] = []
    if _ALLOCATE in ops:
        if has_tables or _FREE in ops:
            owners = _find(episode, group_pools, pools)
        else:
            owners = [_parts(event[2], {}) for event in reversed(events_of(episode, _ALLOCATE))]
    if _ADMIT_LOOKED_UP in ops:
        return owners, _after_lookups(episode, requests, owners)
    return owners, 0


def _update_tables(episode: Episode, requests: Mapping[int, Request], groups: int) -> None:
    for op, event in zip(episode.ops, episode.events, strict=True):
        if op == _ASSIGN:
            numbers, lists = event
            for (number, group), ids in zip(product(numbers, range(groups)), lists, strict=True):
                requests[number].tables.setdefault(group, []).extend(ids)
        elif op in (_ADMIT, _TABLE):
            requests[event[0]].tables = dict(enumerate(map(list, event[-1])))


def _find(episode: Episode, group_pools: Sequence[int], pools: int) -> list[Parts]:
    groups = range(len(group_pools))
    claims: list[dict[int, Owner]] = [{} for _ in range(pools)]
    reused = _reused(episode) if _REUSE in episode.ops else {}
    owners: list[Parts] = []
    for op, event in zip(reversed(episode.ops), reversed(episode.events), strict=True):
        if op == _ALLOCATE:
            owners.append(_parts(event[2], claims[event[1]]))
        elif op == _FREE:
            _, pool, freer, last, held = event
            if freer:
                claims[pool].update(dict.fromkeys(last + held, (freer - 1, -1)))
        elif op in (_ASSIGN, _ADMIT, _TABLE):
            numbers = event[0] if op == _ASSIGN else [event[0]]
            for owner, ids in zip(product(numbers, groups), event[-1], strict=True):
                number, group = owner
                pool = group_pools[group]
                taken_up = reused.get((number, pool), ())
                claim = claims[pool]
                for block in ids:
                    if block not in taken_up:
                        claim[block] = owner
    return owners


def _parts(blocks: list[int], claims: dict[int, Owner]) -> Parts:
    """The blocks by who claims them. Each claim counts once."""
    if not blocks:
        return []
    if claims.keys().isdisjoint(blocks):
        return [(NOBODY, blocks)]
    owners = [claims.pop(block, NOBODY) for block in blocks]
    if owners.count(owners[0]) == len(owners):
        return [(owners[0], blocks)]
    owner_of = iter(owners)
    return [(owner, list(part)) for owner, part in groupby(blocks, lambda _: next(owner_of))]


def _reused(episode: Episode) -> dict[tuple[int, int], set[int]]:
    """By request and pool, the blocks that were reused. They are in that request's table, but were
    handed out, maybe in this very step, to another."""
    reused: dict[tuple[int, int], set[int]] = {}
    number = -1
    for op, event in zip(episode.ops, episode.events, strict=True):
        if op == _LOOKUP:
            number = event[1]
        elif op == _REUSE:
            _, pool, blocks = event
            reused.setdefault((number, pool), set()).update(blocks)
    return reused


def _after_lookups(episode: Episode, requests: Mapping[int, Request], owners: list[Parts]) -> int:
    """Give blocks that nobody claims to the request that was looked up before."""
    admitted = {number: count for number, _, count in events_of(episode, _ADMIT_LOOKED_UP)}
    tables: dict[int, list[int]] = {number: [] for number in admitted}
    number, left = -1, len(owners)
    for op, event in zip(episode.ops, episode.events, strict=True):
        if op == _LOOKUP:
            number = event[1]
            tables[number] = []
        elif op == _REUSE and number in admitted:
            tables[number] += event[2]
        elif op == _ALLOCATE:
            left -= 1
            if number in admitted and any(owner == NOBODY for owner, _ in owners[left]):
                owners[left] = [((number, 0), event[2])]
                tables[number] += event[2]
    for number in admitted:
        requests[number].tables = {0: tables[number]}
    return sum(len(tables[number]) != count for number, count in admitted.items())
