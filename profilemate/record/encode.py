# SPDX-License-Identifier: Apache-2.0
"""Put what the hooks kept into the columns of a frame.

A hook keeps one tuple for an event: the function of this module that lays it out, its op, and what
that function takes. So the engine's thread does no more than that, and an event is whole or not
there at all. The rest is done here, by the thread that writes.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from profilemate.format.events import Columns

Kept = tuple[Any, ...]
"""``(layout, op, *values)``: ``layout(columns, kept)`` appends the event to the columns."""


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


def served(columns: Columns, kept: Kept) -> None:
    """``time, tokens, entry, graphs, ns``: Op.EXECUTION of requests, by a graph of the model."""
    _, op, time, tokens, entry, graphs, launch_ns = kept
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.extend((0, tokens, entry, graphs, launch_ns, 0, 0))


def blob(columns: Columns, kept: Kept) -> None:
    """``time, number, blob``: an event that gives a number to what these bytes say."""
    _, op, time, number, told = kept
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.append(number)
    columns.numbers.append(len(told))
    columns.blobs.append(told)


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
    """``time, number, hashes of the request's blocks, first, last``: Op.CACHE of those in between.

    vLLM goes on adding to the hashes; those of cached blocks stay as they are.
    """
    _, op, time, number, hashes_of, first, last = kept
    hashes = hashes_of[first:last]
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.extend((number, first, len(hashes)))
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


def finished(columns: Columns, kept: Kept) -> None:
    """``time, numbers, hashes``: Op.FINISH."""
    _, op, time, numbers, hashes = kept
    columns.ops.append(op)
    columns.times.append(time)
    columns.numbers.extend(numbers)
    columns.hashes.extend(hashes)


def assigned(columns: Columns, kept: Kept) -> None:
    """``numbers, lists``: Op.ASSIGN; for each request its number, and a list for each group."""
    _, op, numbers, lists = kept
    columns.ops.append(op)
    columns.numbers.append(len(numbers))
    columns.numbers.extend(numbers)
    columns.ids.extend(chain.from_iterable(lists))
