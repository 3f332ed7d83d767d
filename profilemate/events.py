# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of the journal: what a hook may say, and how it is laid out.

An events frame is laid out by columns, so that a hook only appends to lists and packing a
frame is a handful of calls whatever it holds. Each event has one op and then, as said at each
op below, its times, numbers, lists of block ids, hashes and blobs in the columns of that name.

``ops``      bytes: the op, and the pool's index in the bits from ``POOL_SHIFT``
``times``    nanoseconds of the monotonic clock
``numbers``  integers
``lists``    lists of block ids: first those of all events whose ids came from blocks, then those
             of all events whose ids vLLM had listed already (``LISTED``)
``hashes``   ``HASH_BYTES`` bytes each: the first bytes of vLLM's own block hashes
``blobs``    bytes, whose length is one of the event's numbers
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import chain, repeat
from operator import attrgetter, itemgetter, sub
from typing import Any


class Op(IntEnum):
    """One kind of event; n is a count, and "a list" is one of block ids."""

    ALLOCATE = 1
    """Blocks handed out by the pool: a list. 1 time."""
    REUSE = 2
    """Blocks taken up again by a prefix hit: a list. 1 time."""
    FREE = 3
    """References dropped: request + 1 (0: the call named none); a list of the blocks whose last
    holder let go, and one of those that have another. 1 time."""
    RELEASE = 4
    """As FREE, of all n blocks in the request's block table, last first, whose holders are those
    that its other events tell: request, n. 1 time."""
    CACHE = 5
    """n blocks of the request's block table became reusable: request, index of the first in the
    table, n; n hashes. 1 time."""
    CACHE_LIST = 6
    """As CACHE, named one by one: request, group, tokens up to the end of the first, tokens from
    one to the next; a list, as many hashes. 1 time."""
    EVICT = 7
    """Cached blocks lost their content by an explicit eviction: a list. 1 time."""
    RESET = 8
    """The prefix cache was dropped (1) or the reset was refused (0): which. 1 time."""
    MOVE = 9
    """A content moved to another block: source id, target id. 1 time."""
    REQUEST = 10
    """A request arrived: request, n; a blob of n bytes (JSON, NUL, prefix ids). 1 time."""
    LOOKUP = 11
    """A prefix-cache lookup: request, tokens asked for, tokens found, and 1 where the request
    must not read the cache, else 0. 1 time."""
    PREEMPT = 12
    """A running request was preempted: request, tokens computed until then. 1 time."""
    FINISH = 13
    """A request ended: request, prompt tokens, output tokens, computed tokens, n, m; n hashes (of
    its full blocks, where no table tells them), a blob of m bytes (the reason). 1 time."""
    PARK = 14
    """Blocks left their request but stay held until a step in flight ends: request; a list.
    No time."""
    PARK_ALL = 15
    """As PARK, of all blocks in the request's block table: request. No time."""
    ASSIGN = 16
    """Requests that got blocks in the step that ends: n, n requests; for each request and each
    KV cache group a list. No time."""
    TABLE = 17
    """All blocks that a request holds: request; a list for each group. No time."""
    ADMIT = 18
    """A waiting request began to run: request, tokens already computed; a list for each group:
    all blocks that it holds. No time."""
    STEP = 19
    """``schedule()`` ended: running, waiting, scheduled tokens, prefill tokens, scheduled
    requests, then the free blocks of each pool. 2 times: begin and end."""
    UPDATE = 20
    """``update_from_output()`` ended: running, waiting, then the free blocks of each pool.
    1 time."""
    REPEAT = 21
    """The last step, which scheduled nothing, was repeated n more times with the same lookups:
    n. 1 time: the end of the last one."""
    FIRST_TOKEN = 22
    """The first output tokens of n requests arrived: n, n requests. 1 time."""


LISTED = frozenset((Op.EVICT, Op.ASSIGN, Op.TABLE, Op.ADMIT))
"""Ops whose ids are not taken from blocks; their lists stand behind those of all others."""

OP_MASK = 0x1F
POOL_SHIFT = 5
MAX_POOLS = 8

HASH_BYTES = 8
"""Bytes kept of a block hash: any two of 10 million contents collide with a chance of 3e-6."""

PREFIX_BYTES = 6
"""Bytes of one prefix id: whole in a JSON number."""

FRAME = struct.Struct("<q7I4s")
"""Head of an events frame: the earliest time, the lengths of ops, times, numbers, lists, ids and
hashes and how many of the lists came from blocks, and the typecodes of times (from the earliest
one on), numbers, lists (their lengths) and ids."""

_first_bytes = itemgetter(slice(0, HASH_BYTES))
_block_id = attrgetter("block_id")


def op_of(op: Op, pool: int) -> int:
    """The byte that stands for an event in this pool."""
    return pool << POOL_SHIFT | op


class Columns:
    """Events that were not written yet. Hooks append to the lists, in the order said at each op.

    ``blocks`` holds a list of vLLM's blocks for each list of ids that comes from blocks; their
    ids are read when the frame is packed. ``ids`` holds the other lists.
    """

    __slots__ = ("blobs", "blocks", "hashes", "ids", "numbers", "ops", "times")

    def __init__(self) -> None:
        self.ops: list[int] = []
        self.times: list[int] = []
        self.numbers: list[int] = []
        self.blocks: list[Sequence[Any]] = []
        self.ids: list[Sequence[int]] = []
        self.hashes: list[bytes] = []
        self.blobs: list[bytes] = []

    def pack(self) -> bytes:
        """The payload of a frame that holds these events; there must be one with a time."""
        earliest = min(self.times)
        times = _packed(list(map(sub, self.times, repeat(earliest))), "Iq")
        numbers = _packed(self.numbers, "HI")
        lists = [*map(len, self.blocks), *map(len, self.ids)]
        lengths = _packed(lists, "HI")
        from_blocks = map(_block_id, chain.from_iterable(self.blocks))
        ids = _packed([*from_blocks, *chain.from_iterable(self.ids)], "HI")
        codes = times.typecode + numbers.typecode + lengths.typecode + ids.typecode
        head = FRAME.pack(
            earliest,
            len(self.ops),
            len(times),
            len(numbers),
            len(lists),
            len(ids),
            len(self.hashes),
            len(self.blocks),
            codes.encode(),
        )
        columns = (head, bytes(self.ops), times, numbers, lengths, ids)
        return b"".join((*columns, _shortened(self.hashes), *self.blobs))

    def clear(self) -> None:
        """Forget all events."""
        for name in self.__slots__:
            getattr(self, name).clear()


def _packed(values: Iterable[int], codes: str) -> array[int]:
    """The values in the narrowest of these array types that holds them all."""
    try:
        return array(codes[0], values)
    except OverflowError:
        return array(codes[1], values)


def _shortened(hashes: list[bytes]) -> bytes:
    """The first ``HASH_BYTES`` bytes of each."""
    joined = b"".join(hashes)
    width = len(hashes[0]) if hashes else HASH_BYTES
    if len(joined) == width * len(hashes) and not width % HASH_BYTES:
        return memoryview(joined).cast("Q")[:: width // HASH_BYTES].tobytes()
    return b"".join(map(_first_bytes, hashes))


def prefix_lengths(prompt_tokens: int) -> list[int]:
    """The prefix lengths, in tokens, that a prompt of this length has ids for.

    16, 32, 48, … 1,024, then 2,048, 4,096 and so on, none longer than the prompt.

    >>> prefix_lengths(50)
    [16, 32, 48]
    >>> prefix_lengths(5000)[-3:]
    [1024, 2048, 4096]
    """
    lengths = list(range(16, min(prompt_tokens, 1024) + 1, 16))
    longer = 2048
    while longer <= prompt_tokens:
        lengths.append(longer)
        longer *= 2
    return lengths
