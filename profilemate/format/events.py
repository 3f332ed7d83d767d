# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of the journal: the kinds of events, and how a frame holds them.

A frame holds events by columns, so a handful of calls pack it, whatever it holds. Each event has
one op and, as described at each op below, its times, numbers, lists of block ids, hashes and blobs
in the columns of that name.

``ops``      bytes: the op, and the pool's index in the bits from ``POOL_SHIFT``
``times``    nanoseconds of the monotonic clock
``numbers``  integers
``lists``    lists of block ids: first all those that are read from blocks, then those of EVICT,
             ASSIGN, TABLE, ADMIT and RESUME, which vLLM itself has as ids
``hashes``   ``HASH_BYTES`` bytes each: the first bytes of vLLM's own block hashes
``blobs``    bytes, whose length is one of the event's numbers
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from enum import IntEnum
from itertools import chain
from operator import itemgetter
from typing import Any


class Op(IntEnum):
    """The kind of an event. n is a count; "a list" is one of block ids."""

    MORE = 0
    """An event of a kind that has no op of its own, as all others are taken: its kind (``More``),
    n; a blob of n bytes: JSON. 1 time."""
    ALLOCATE = 1
    """Blocks handed out by the pool: a list. 1 time."""
    REUSE = 2
    """Blocks reused after a prefix hit: a list. 1 time."""
    FREE = 3
    """A request let go of blocks: request + 1 (0: not known); a list of the blocks that nobody
    holds any more, and one of those that another request holds. 1 time."""
    RELEASE = 4
    """As FREE, for all n blocks in the request's block table, last first: request, n. The other
    events say who holds them. 1 time."""
    CACHE = 5
    """n blocks of the request's block table got contents that a lookup can find: request, index of
    the first in the table, n; n hashes. 1 time."""
    CACHE_LIST = 6
    """As CACHE, block by block: request, group, tokens up to the end of the first, tokens from one
    to the next; a list, as many hashes. 1 time."""
    EVICT = 7
    """Cached blocks lost their content by an explicit eviction: a list. 1 time."""
    RESET = 8
    """The prefix cache was reset: 1, or 0 where vLLM refused to. 1 time."""
    MOVE = 9
    """A content moved to another block: source id, target id. 1 time."""
    REQUEST = 10
    """A request arrived: request, n; a blob of n bytes (JSON, NUL, bare hashes, prefix ids). 1
    time."""
    LOOKUP = 11
    """A prefix-cache lookup: request, tokens asked for, tokens found, and 1 where the request must
    not read the cache, else 0. 1 time."""
    PREEMPT = 12
    """A running request was preempted: request, tokens computed until then. 1 time."""
    FINISH = 13
    """A request ended: request, prompt tokens, output tokens, computed tokens, n, and the reason's
    place in ``REASONS``; n hashes (of its full blocks, where its block table does not lead to
    them). 1 time."""
    PARK = 14
    """A request let go of blocks, which stay held until a step in flight ends: request; a list. No
    time."""
    PARK_ALL = 15
    """As PARK, for all blocks in the request's block table: request. No time."""
    ASSIGN = 16
    """Requests that got blocks in the step that ends: n, n requests; for each request and each KV
    cache group a list. No time."""
    TABLE = 17
    """All blocks that a request holds: request; a list for each group. No time."""
    ADMIT = 18
    """A waiting request began to run: request, tokens already computed; a list for each group:
    all blocks that it holds. No time."""
    ADMIT_LOOKED_UP = 19
    """As ADMIT, for a request whose n blocks are those of this step's events after its lookup:
    request, tokens already computed, n. No time."""
    STEP = 20
    """``schedule()`` ended: running, waiting, scheduled tokens, prefill tokens, scheduled
    requests, then the free blocks of each pool. 2 times: begin and end."""
    UPDATE = 21
    """``update_from_output()`` ended: running, waiting, then the free blocks of each pool.
    1 time."""
    REPEAT = 22
    """The last step, which scheduled nothing, was repeated n times with the same lookups: n. 1
    time: the last one's end."""
    FIRST_TOKEN = 23
    """The first output tokens of n requests arrived: n, n requests. 1 time."""
    GRAPH = 24
    """An entry, to which the CUDA graphs that are captured next belong: its number, n; a blob of n
    bytes: a JSON list of mode, num_tokens, num_reqs, uniform, has_lora, source, kind, part.
    1 time."""
    CAPTURE = 25
    """A CUDA graph was captured: entry, KiB of device memory that it takes + 1 (0: not known).
    2 times: begin, end."""
    BATCH = 26
    """A batch descriptor: its number, n; a blob of n bytes: a JSON list of mode, num_tokens,
    num_reqs, uniform, has_lora. 1 time."""
    EXECUTION = 27
    """An execution: batch (0: the entry's), tokens without padding, entry that was replayed (0:
    none), CUDA graphs replayed, ns to launch them, ns that they took on the GPU + 1 (0: not
    measured), 1 for a dummy. 1 time: its end, when all was launched."""
    REPLAY = 28
    """CUDA graphs were replayed outside any execution: entry (0: unknown), graphs, ns to launch
    them, ns on the GPU + 1 (0: not measured). 1 time."""
    LOST = 29
    """A part of the recording ended before the rest: its place in ``PARTS``. 1 time."""
    PAUSE = 30
    """The user paused the recording: nothing is recorded from here on. 1 time."""
    RESUME = 31
    """It goes on, and this is how a pool stands: running, waiting, n, n groups; a list of the
    blocks that are held, one that has a block once more for each further holder, and for each group
    one of the blocks that have a content; as many hashes. The requests that are there, and their
    tables, came just before. 1 time. A worker has no pool: 3 times 0, and two empty lists."""


class More(IntEnum):
    """The kind of an event of ``Op.MORE``, and its JSON."""

    EXPERTS = 1
    """Tokens that a worker's MoE layers gave to their experts: when the counting of these began, in
    nanoseconds; tokens that were routed since; for each layer a list of its number, a list of the
    tokens of each expert, and one of those of each expert-parallel rank's experts; null or nothing
    in place of the last where that is not known."""
    EXPERT_PAIRS = 2
    """Pairs of experts that were chosen together, since the worker began: tokens that were routed;
    for each pair a list: layer, expert, expert, tokens that went to both, tokens expected there by
    chance, tokens of the one and of the other."""
    DRAFTS = 3
    """What speculation brought a request that ends: request, tokens that were proposed, those of
    them that were accepted."""
    TRACE = 4
    """The trace of OpenTelemetry's that a request which just arrived belongs to: request, trace id
    and the id of the span above it, in W3C's spelling."""
    ENCODER = 5
    """What the step that ends gives to the encoder of a multimodal model: items, and the tokens
    that they become; null in place of the tokens where they are not known."""
    PHASES = 6
    """A step that a worker executed: prefill tokens, decode tokens, requests with prefill tokens,
    those without, nanoseconds on the GPU, items for the encoder, nanoseconds of the encoder on the
    GPU; null where a time is not known."""


TRACE_ID, SPAN_ID = "[0-9a-f]{32}", "[0-9a-f]{16}"
"""How W3C's Trace Context writes a trace and a span. Only zeros stand for none."""


PARTS = {
    "blocks": "kv_cache_usage.csv, kv_cache_allocations.csv and kv_cache_evictions.csv",
    "frees": "preemptions",
    "lookups": "prefix_cache_lookups.csv, hits of requests.jsonl, and which requests reused blocks",
    "requests": "requests.jsonl, and how many requests each step finished",
    "updates": "first tokens, and the pool's usage between steps",
    "graphs": "the cuda_graph tables",
    "executions": "cuda_graph_timeline.csv",
    "experts": "moe_experts.csv and moe_pairs.csv",
    "phases": "gpu_steps.csv",
}
"""The parts of a recording that can end alone, and what is lost with each. The journal names a part
by its place, so new ones come last."""

REASONS = ("stop", "length", "abort", "error", "repetition", "other")
"""Why a request ended, in vLLM's words. The last stands for reasons that are not here."""

CAME_BEFORE, PREEMPTED_BEFORE = 1, 2
"""What the description of a request ends with that was there when the recording went on after a
pause: in the second case it waits to be resumed."""

NOT_KNOWN = -1
"""In a request's description the number of its bare hashes, where they could not be made."""

OP_MASK = 0x1F
POOL_SHIFT = 5
MAX_POOLS = 8

HASH_BYTES = 8
"""Bytes of a block hash in the journal. Among 10 million contents, the chance that any two collide
is 3e-6."""

PREFIX_BYTES = 6
"""Bytes of one prefix id, which a JSON number holds exactly."""

FRAME = struct.Struct("<q7I4s")
"""Head of an events frame: the time of the frame before it, the lengths of ops, times,
numbers, lists, ids and hashes, how many of the lists came from blocks, and the typecodes of times,
numbers, lists (their lengths) and ids. Times of four bytes are the lower halves."""

_TYPECODES = re.compile(rb"[Iq][HI]{3}")

LOWER_HALF = (1 << 32) - 1

WHOLE_NS = 1 << 31
"""A time's lower half is enough where another time, at most this far away, is known."""

_first_bytes = itemgetter(slice(0, HASH_BYTES))


def op_of(op: Op, pool: int) -> int:
    """The byte that stands for an event in this pool."""
    return pool << POOL_SHIFT | op


class Columns:
    """The columns of a frame to be, each event's values in the order given at its op.

    ``blocks`` has lists of vLLM's blocks, whose ids are read when the frame is packed. ``ids`` has
    the other lists.
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

    def pack(self, since: int) -> bytes:
        """The payload of a frame with these events. ``since`` is the time of the frame before."""
        times, numbers, blocks, hashes = self.times, self.numbers, self.blocks, self.hashes
        time_code, packed_times = _packed_times(times, since)
        number_code, packed_numbers = _packed(numbers)
        lengths = [*map(len, blocks), *map(len, self.ids)]
        length_code, packed_lengths = _packed(lengths)
        ids = [block.block_id for block in chain.from_iterable(blocks)]
        ids.extend(chain.from_iterable(self.ids))
        id_code, packed_ids = _packed(ids)
        head = FRAME.pack(
            since,
            len(self.ops),
            len(times),
            len(numbers),
            len(lengths),
            len(ids),
            len(hashes),
            len(blocks),
            time_code + number_code + length_code + id_code,
        )
        columns = (bytes(self.ops), packed_times, packed_numbers, packed_lengths, packed_ids)
        return b"".join((head, *columns, _shortened(hashes), *self.blobs))


def _packed(values: list[int]) -> tuple[bytes, bytes]:
    """Typecode and bytes of the values: two bytes each if all of them fit, else four."""
    try:
        return b"H", struct.pack(f"{len(values)}H", *values)
    except struct.error:
        return b"I", struct.pack(f"{len(values)}I", *values)


def _packed_times(times: list[int], since: int) -> tuple[bytes, bytes]:
    """Typecode and bytes of the times: their lower halves, unless too much time has passed."""
    packed = struct.pack(f"{len(times)}q", *times)
    if times and max(times) - since < WHOLE_NS > since - min(times):
        return b"I", memoryview(packed).cast("I")[::2].tobytes()
    return b"q", packed


def is_head(payload: bytes) -> bool:
    """Whether an events frame may begin like this."""
    return len(payload) >= FRAME.size and bool(_TYPECODES.match(payload, FRAME.size - 4))


def whole_times(lower_halves: list[int], since: int) -> list[int]:
    """Times in nanoseconds, from their lower halves and a time that is near all of them."""
    begin = since - WHOLE_NS
    return [begin + ((half - begin) & LOWER_HALF) for half in lower_halves]


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
