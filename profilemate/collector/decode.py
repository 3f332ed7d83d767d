# SPDX-License-Identifier: Apache-2.0
"""Take an events frame apart, as profilemate.events lays it out."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from profilemate.events import FRAME, LISTED, OP_MASK, POOL_SHIFT, Op, whole_times


class Event(NamedTuple):
    """One event. ``numbers`` has its fixed numbers, without counts that only tell lengths.

    ``time`` and ``until`` are the same but for a step, and 0 where the event has no time.
    """

    op: int
    pool: int
    time: int
    until: int
    numbers: list[int]
    lists: list[list[int]]
    hashes: list[int]
    blob: bytes


class DecodeError(Exception):
    """The frame is not laid out as it says."""


class Shape(NamedTuple):
    """How many pools and KV cache groups the engine has, which no frame repeats."""

    pools: int
    groups: int


_UNTIMED = frozenset((Op.PARK, Op.PARK_ALL, Op.ASSIGN, Op.TABLE, Op.ADMIT))

_NUMBERS: dict[int, int] = {
    Op.ALLOCATE: 0,
    Op.REUSE: 0,
    Op.FREE: 1,
    Op.RELEASE: 2,
    Op.CACHE: 3,
    Op.CACHE_LIST: 4,
    Op.EVICT: 0,
    Op.RESET: 1,
    Op.MOVE: 2,
    Op.REQUEST: 2,
    Op.LOOKUP: 4,
    Op.PREEMPT: 2,
    Op.FINISH: 6,
    Op.PARK: 1,
    Op.PARK_ALL: 1,
    Op.ASSIGN: 1,
    Op.TABLE: 1,
    Op.ADMIT: 2,
    Op.STEP: 5,
    Op.UPDATE: 2,
    Op.REPEAT: 1,
    Op.FIRST_TOKEN: 1,
}
"""Fixed numbers of each op; those that they announce come on top."""

_ENDS = (Op.STEP, Op.UPDATE)

_ONE_LIST = frozenset(
    (Op.ALLOCATE, Op.REUSE, Op.FREE, Op.CACHE_LIST, Op.EVICT, Op.PARK),
)


def episodes(payload: bytes, shape: Shape) -> list[tuple[int, list[Event]]]:
    """The events of a frame by steps, each step's with the time of its last one.

    Raises:
        DecodeError: the frame is not as long as it says, or names an unknown op.

    """
    found: list[tuple[int, list[Event]]] = []
    events: list[Event] = []
    time = 0
    try:
        for event in _events(payload, shape):
            events.append(event)
            time = event.until or time
            if event.op in _ENDS:
                found.append((time, events))
                events = []
    except (IndexError, KeyError, ValueError, struct.error) as error:
        raise DecodeError(f"events frame: {error}") from None
    if events:
        found.append((time, events))
    return found


def _events(payload: bytes, shape: Shape) -> Iterator[Event]:
    (
        since,
        num_ops,
        num_times,
        num_numbers,
        num_lists,
        num_ids,
        num_hashes,
        list_at,
        codes,
    ) = FRAME.unpack_from(payload)
    begin = FRAME.size + num_ops
    ops = payload[FRAME.size : begin]
    columns: list[list[int]] = []
    for code, length in zip(
        codes.decode() + "Q",
        (num_times, num_numbers, num_lists, num_ids, num_hashes),
        strict=True,
    ):
        column = array(code)
        end = begin + length * column.itemsize
        column.frombytes(payload[begin:end])
        if len(column) != length:
            raise ValueError("it is cut off")
        columns.append(column.tolist())
        begin = end
    times, numbers, lengths, ids, hashes = columns
    if codes[:1] == b"I":
        times = whole_times(times, since)
    blob_at = begin
    block_at, listed_at = 0, sum(lengths[:list_at])
    num_from_blocks = list_at
    from_blocks = 0
    time_at = number_at = hash_at = 0
    for byte in ops:
        op = byte & OP_MASK
        fixed = _NUMBERS[op]
        told = numbers[number_at : number_at + fixed]
        number_at += fixed
        time = until = 0
        if op not in _UNTIMED:
            time = until = times[time_at]
            time_at += 1
        lists: list[list[int]] = []
        told_hashes: list[int] = []
        blob = b""
        if op in _ONE_LIST:
            if op in LISTED:
                length = lengths[list_at]
                list_at += 1
                lists.append(ids[listed_at : listed_at + length])
                listed_at += length
            else:
                length = lengths[from_blocks]
                from_blocks += 1
                lists.append(ids[block_at : block_at + length])
                block_at += length
                if op == Op.FREE:
                    length = lengths[from_blocks]
                    from_blocks += 1
                    lists.append(ids[block_at : block_at + length])
                    block_at += length
            if op == Op.CACHE_LIST:
                told_hashes = hashes[hash_at : hash_at + length]
                hash_at += length
        elif op == Op.CACHE:
            told_hashes = hashes[hash_at : hash_at + told[2]]
            hash_at += told[2]
        elif op in (Op.STEP, Op.UPDATE):
            told += numbers[number_at : number_at + shape.pools]
            number_at += shape.pools
            if op == Op.STEP:
                until = times[time_at]
                time_at += 1
        elif op in LISTED:
            groups = shape.groups
            if op == Op.ASSIGN:
                requests = numbers[number_at : number_at + told[0]]
                number_at += told[0]
                groups *= told[0]
                told = requests
            for length in lengths[list_at : list_at + groups]:
                lists.append(ids[listed_at : listed_at + length])
                listed_at += length
            list_at += groups
        elif op == Op.FIRST_TOKEN:
            told = numbers[number_at : number_at + told[0]]
            number_at += len(told)
        elif op == Op.REQUEST:
            blob = payload[blob_at : blob_at + told[1]]
            blob_at += told[1]
        elif op == Op.FINISH:
            told_hashes = hashes[hash_at : hash_at + told[4]]
            hash_at += told[4]
            blob = payload[blob_at : blob_at + told[5]]
            blob_at += told[5]
        yield Event(op, byte >> POOL_SHIFT, time, until, told, lists, told_hashes, blob)
    ends = (time_at, number_at, from_blocks, list_at, listed_at, hash_at, blob_at)
    wanted = (
        num_times,
        num_numbers,
        num_from_blocks,
        num_lists,
        num_ids,
        num_hashes,
        len(payload),
    )
    if ends != wanted:
        raise ValueError("its columns do not belong together")
