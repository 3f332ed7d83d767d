# SPDX-License-Identifier: Apache-2.0
"""Put what the hooks kept into the columns of a frame.

A hook keeps one tuple for an event: the function of this module that lays it out, its op, and what
that function takes. So the engine's thread does no more than that, and an event is whole or not
there at all. The rest is done here, by the thread that writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, compress
from typing import Any

import orjson

from profilemate.events import Columns, Op

Kept = tuple[Any, ...]
"""``(layout, op, *values)``: ``layout(columns, kept)`` appends the event to the columns."""

Layout = Callable[[Columns, Kept], None]


def once(columns: Columns, kept: Kept) -> None:
    """``time, numbers``: an event that says no more."""
    _, op, time, numbers = kept
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.extend(numbers)


def untimed(columns: Columns, kept: Kept) -> None:
    """``numbers``: as ``once``, of an event without a time."""
    _, op, numbers = kept
    columns.ops.append(op)
    columns.numbers.extend(numbers)


def between(columns: Columns, kept: Kept) -> None:
    """``began, ended, numbers``: as ``once``, of an event with two times."""
    _, op, began, ended, numbers = kept
    columns.ops.append(op)
    columns.times.append(began)
    columns.times.append(ended)
    columns.numbers.extend(numbers)


def described(columns: Columns, kept: Kept) -> None:
    """``time, number, value``: an event that gives a number to what this says, as JSON."""
    _, op, time, number, value = kept
    _append_blob(columns, op, time, number, orjson.dumps(value))


def blocks(columns: Columns, kept: Kept) -> None:
    """``time, *blocks``: an event of one list of blocks."""
    columns.ops.append(kept[1])
    columns.times.append(kept[2])
    columns.blocks.append(kept[3:])


def freed(columns: Columns, kept: Kept) -> None:
    """``time, freer, last, shared``: Op.FREE."""
    _, op, time, freer, last, shared = kept
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.append(freer)
    columns.blocks.append(last)
    columns.blocks.append(shared)


def cached(columns: Columns, kept: Kept) -> None:
    """``numbers by request id, time, request id, its hashes, first, last``: Op.CACHE.

    vLLM goes on adding to the hashes; those of cached blocks stay as they are.
    """
    _, op, by_id, time, request_id, hashes_of, first, last = kept
    hashes = hashes_of[first:last]
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.extend((by_id[request_id], first, len(hashes)))
    columns.hashes.extend(hashes)


def cached_list(columns: Columns, kept: Kept) -> None:
    """``time, numbers, blocks, hashes``: Op.CACHE_LIST."""
    _, op, time, numbers, run, hashes = kept
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.extend(numbers)
    columns.blocks.append(run)
    columns.hashes.extend(hashes)


def evicted(columns: Columns, kept: Kept) -> None:
    """``time, ids``: Op.EVICT."""
    _, op, time, ids = kept
    columns.ops.append(op)
    columns.times.append(time)
    columns.ids.append(ids)


def parked(columns: Columns, kept: Kept) -> None:
    """``number, blocks``: Op.PARK."""
    _, op, number, run = kept
    columns.ops.append(op)
    columns.numbers.append(number)
    columns.blocks.append(run)


def held(columns: Columns, kept: Kept) -> None:
    """``numbers, lists``: Op.TABLE and Op.ADMIT."""
    _, op, numbers, lists = kept
    columns.ops.append(op)
    columns.numbers.extend(numbers)
    columns.ids.extend(lists)


def arrived(columns: Columns, kept: Kept) -> None:
    """``numbers by request id, request id, time, number, blob``: Op.REQUEST."""
    _, op, by_id, request_id, time, number, blob = kept
    by_id[request_id] = number
    _append_blob(columns, op, time, number, blob)


def finished(columns: Columns, kept: Kept) -> None:
    """``numbers by request id, request id, time, numbers, hashes``: Op.FINISH."""
    _, op, by_id, request_id, time, numbers, hashes = kept
    by_id.pop(request_id, None)
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.extend(numbers)
    columns.hashes.extend(hashes)


def assigned(columns: Columns, kept: Kept) -> None:
    """``numbers by request id, request ids, blocks``: Op.ASSIGN, unless nobody got blocks.

    ``blocks`` has an item for each request: None, or a list of block ids for each group.
    """
    _, op, by_id, request_ids, blocks_of = kept
    handed_out: list[Sequence[Sequence[int]]] = list(filter(None, blocks_of))
    if handed_out:
        columns.ops.append(op)
        columns.numbers.append(len(handed_out))
        columns.numbers.extend(map(by_id.__getitem__, compress(request_ids, blocks_of)))
        columns.ids.extend(chain.from_iterable(handed_out))


def _append_blob(columns: Columns, op: Op, time: int, number: int, blob: bytes) -> None:
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.append(number)
    columns.numbers.append(len(blob))
    columns.blobs.append(blob)
