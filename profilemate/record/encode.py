# SPDX-License-Identifier: Apache-2.0
"""Lay events out in the columns of a frame.

For an event a hook keeps one tuple: the function of this module that lays it out, its op, and the
values that this function takes. The engine's thread does no more, and an event is there whole or
not at all. The thread that writes does the rest, here.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import orjson

from profilemate.format.events import HASH_BYTES, NOT_KNOWN, Columns

Event = tuple[Any, ...]
"""``(layout, op, *values)``: ``layout(columns, event)`` appends the event to the columns."""


def once(columns: Columns, event: Event) -> None:
    """``time, numbers``: an event with one time and numbers."""
    _, op, time, numbers = event
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.extend(numbers)


def untimed(columns: Columns, event: Event) -> None:
    """``numbers``: an event without a time."""
    _, op, numbers = event
    columns.ops.append(op)
    columns.numbers.extend(numbers)


def between(columns: Columns, event: Event) -> None:
    """``began, ended, numbers``: an event with two times."""
    _, op, began, ended, numbers = event
    columns.ops.append(op)
    columns.times.append(began)
    columns.times.append(ended)
    columns.numbers.extend(numbers)


def served(columns: Columns, event: Event) -> None:
    """``time, tokens, entry, graphs, ns``: Op.EXECUTION of requests, by a graph of the model."""
    _, op, time, tokens, entry, graphs, launch_ns = event
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.extend((0, tokens, entry, graphs, launch_ns, 0, 0))


def blob(columns: Columns, event: Event) -> None:
    """``time, number, blob``: an event that numbers what the blob describes."""
    _, op, time, number, data = event
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.append(number)
    columns.numbers.append(len(data))
    columns.blobs.append(data)


def more(columns: Columns, event: Event) -> None:
    """``time, kind, values``: Op.MORE, whose JSON the values become."""
    _, op, time, kind, values = event
    blob(columns, (blob, op, time, kind, orjson.dumps(values)))


def set_apart(columns: Columns, event: Event) -> None:
    """``time, number, text, prefixes, hash_bare``: Op.REQUEST of a request with a cache salt or an
    adapter. ``text`` is the description as a JSON list, and ``hash_bare`` makes its bare hashes.

    They are made here, as vLLM's hasher takes microseconds a block.
    """
    _, op, time, number, text, prefixes, hash_bare = event
    hashes = None if hash_bare is None else hash_bare()
    shortened = b"".join(each[:HASH_BYTES] for each in hashes or ())
    count = NOT_KNOWN if hashes is None else len(hashes)
    described = b"%b,%d]\0" % (text[:-1], count)
    blob(columns, (blob, op, time, number, described + shortened + prefixes))


def blocks(columns: Columns, event: Event) -> None:
    """``time, *blocks``: an event of one list of blocks."""
    columns.ops.append(event[1])
    columns.times.append(event[2])
    columns.blocks.append(event[3:])


def freed(columns: Columns, event: Event) -> None:
    """``time, freer, last, still_held``: Op.FREE."""
    _, op, time, freer, last, still_held = event
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.append(freer)
    columns.blocks.append(last)
    columns.blocks.append(still_held)


def cached(columns: Columns, event: Event) -> None:
    """``time, number, hashes of the request's blocks, first, last``: Op.CACHE of those in between.

    vLLM goes on adding to the request's hashes, but never changes those of cached blocks.
    """
    _, op, time, number, hashes_of, first, last = event
    hashes = hashes_of[first:last]
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.extend((number, first, len(hashes)))
    columns.hashes.extend(hashes)


def cached_list(columns: Columns, event: Event) -> None:
    """``time, numbers, blocks, hashes``: Op.CACHE_LIST."""
    _, op, time, numbers, blocks_of, hashes = event
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.extend(numbers)
    columns.blocks.append(blocks_of)
    columns.hashes.extend(hashes)


def evicted(columns: Columns, event: Event) -> None:
    """``time, ids``: Op.EVICT."""
    _, op, time, ids = event
    columns.ops.append(op)
    columns.times.append(time)
    columns.ids.append(ids)


def parked(columns: Columns, event: Event) -> None:
    """``number, blocks``: Op.PARK."""
    _, op, number, blocks_of = event
    columns.ops.append(op)
    columns.numbers.append(number)
    columns.blocks.append(blocks_of)


def held(columns: Columns, event: Event) -> None:
    """``numbers, lists``: Op.TABLE and Op.ADMIT."""
    _, op, numbers, lists = event
    columns.ops.append(op)
    columns.numbers.extend(numbers)
    columns.ids.extend(lists)


def resumed(columns: Columns, event: Event) -> None:
    """``time, running, waiting, standing, group_of, hash_bytes``: Op.RESUME. ``standing`` has the
    id, the holders and vLLM's hash of each block that has either; the functions say what is in a
    hash."""
    _, op, time, running, waiting, standing, group_of, hash_bytes = event
    held = [block for block, holders, _ in standing if holders > 0]
    again = [block for block, holders, _ in standing for _ in range(holders - 1)]
    by_group: dict[int, list[tuple[int, bytes]]] = {}
    for block, _, block_hash in standing:
        if block_hash is not None:
            entry = block, hash_bytes(block_hash)
            by_group.setdefault(group_of(block_hash), []).append(entry)
    groups = sorted(by_group)
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.extend((running, waiting, len(groups), *groups))
    columns.ids.extend((held, again))
    for group in groups:
        columns.ids.append([block for block, _ in by_group[group]])
        columns.hashes.extend(each for _, each in by_group[group])


def finished(columns: Columns, event: Event) -> None:
    """``time, numbers, hashes``: Op.FINISH."""
    _, op, time, numbers, hashes = event
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.extend(numbers)
    columns.hashes.extend(hashes)


def assigned(columns: Columns, event: Event) -> None:
    """``numbers, lists``: Op.ASSIGN; for each request its number, and a list for each group."""
    _, op, numbers, lists = event
    columns.ops.append(op)
    columns.numbers.append(len(numbers))
    columns.numbers.extend(numbers)
    columns.ids.extend(chain.from_iterable(lists))
