# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of the journal: what a hook may say, and how it is laid out.

An events frame carries four sequences that grow together, so that a hook only appends:

``words``   unsigned 32-bit integers: each event is one head word and its operands
``times``   signed 64-bit integers: nanoseconds of the monotonic clock
``hashes``  ``HASH_BYTES`` bytes each: the first bytes of vLLM's own block hashes
``blobs``   bytes, whose lengths stand in the head words that announce them

The head word is ``count << 8 | pool << 5 | op``. What ``count`` counts, which operands follow
it and how many times, hashes and blobs belong to the event is said at each op below.
"""

from __future__ import annotations

import struct
from enum import IntEnum


class Op(IntEnum):
    """One kind of event. Operands are words; ``n`` is the head word's count."""

    ALLOCATE = 1
    """n blocks handed out by the pool: n block ids. 1 time."""
    REUSE = 2
    """n blocks taken up again by a prefix hit: n block ids. 1 time."""
    FREE = 3
    """n references dropped: request + 1 (0: the call named none), n block ids, each with
    ``STILL_HELD`` set where another holder remains. 1 time."""
    CACHE = 4
    """n blocks became reusable: request, group, tokens up to the end of the first, tokens from
    one to the next, n block ids. 1 time, n hashes."""
    EVICT = 5
    """n cached blocks lost their content by an explicit eviction: n block ids. 1 time."""
    RESET = 6
    """The prefix cache was dropped (n = 1) or the reset was refused (n = 0). 1 time."""
    MOVE = 7
    """A content moved to another block: source id, target id. 1 time."""
    REQUEST = 8
    """A request arrived: request; a blob of n bytes (JSON). 1 time."""
    LOOKUP = 9
    """A prefix-cache lookup (n = 1: the request must not read the cache): request, tokens
    asked for, tokens found. 1 time."""
    PREEMPT = 10
    """A running request was preempted: request, tokens computed until then. 1 time."""
    FINISH = 11
    """A request ended: request; a blob of n bytes (JSON). 1 time."""
    PARK = 12
    """n blocks left their request but stay held until a step in flight ends: request, n block
    ids. No time."""
    ASSIGN = 13
    """The request that got n blocks in the step that ends: request, group, n block ids.
    No time."""
    TABLE = 14
    """As ASSIGN, but the n ids are all that the request holds in the group. No time."""
    ADMIT = 15
    """A waiting request began to run: request, tokens already computed. No time."""
    STEP = 16
    """``schedule()`` ended: running, waiting, scheduled tokens, prefill tokens, scheduled
    requests, then the free blocks of each of the n pools. 2 times: begin and end."""
    UPDATE = 17
    """``update_from_output()`` ended: running, waiting, then the free blocks of each of the n
    pools. 1 time."""
    REPEAT = 18
    """The last step, which scheduled nothing, was repeated n more times with the same lookups.
    1 time: the end of the last one."""
    FIRST_TOKEN = 19
    """The first output tokens of n requests arrived: n requests. 1 time."""


def head(op: Op, count: int = 0, pool: int = 0) -> int:
    """The head word of an event."""
    return count << COUNT_SHIFT | pool << POOL_SHIFT | op


OP_MASK = 0x1F
POOL_SHIFT = 5
POOL_MASK = 0x7
COUNT_SHIFT = 8
MAX_POOLS = POOL_MASK + 1

STILL_HELD = 0x8000_0000
"""Set in a freed block's id where the block has another holder."""

HASH_BYTES = 8
"""Bytes kept of a block hash: any two of 10 million contents collide with a chance of 3e-6."""

PREFIX_BYTES = 6
"""Bytes of one prefix id: whole in a JSON number."""

EVENTS_HEAD = struct.Struct("<IIII")
"""Head of an events frame: number of times, hashes, words and blob bytes."""


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
