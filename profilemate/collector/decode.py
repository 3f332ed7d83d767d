# SPDX-License-Identifier: Apache-2.0
"""Take an events frame apart, as profilemate.format.events lays it out."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from itertools import accumulate, islice, pairwise
from operator import mul
from typing import Any, NamedTuple

from profilemate.format.events import (
    FRAME,
    HASH_BYTES,
    OP_MASK,
    POOL_SHIFT,
    More,
    Op,
    is_head,
    whole_times,
)

_SHORT = "a column ends too early"

GAP = 0xFF
"""Stands in an episode for events that are missing there. No journal can have this op: it is larger
than ``OP_MASK``."""

LONGEST_NS = 1 << 58
"""No session lasts nine years: a later time was never measured."""

Event = tuple[Any, ...]
"""The values of one event, as its op's reader in ``_READERS`` puts them together."""

ContentIds = Callable[[bytes], list[str]]
"""Turns hashes, one after the other, into content ids."""


class Episode(NamedTuple):
    """The events of one step, or those between two steps, and the time of the last one. What pauses
    the recording, or lets it go on, ends an episode, too.

    ``ops`` holds each event's op, without its pool.
    """

    time: int
    ops: bytes
    events: list[Event]


def events_of(episode: Episode, op: int) -> list[Event]:
    """The episode's events with this op."""
    pairs = zip(episode.ops, episode.events, strict=True)
    return [event for its_op, event in pairs if its_op == op]


class DecodeError(Exception):
    """The frame is not what it should be. The text says why."""


class ImpossibleError(Exception):
    """No engine can have done this, after what it did before. The text says why."""


class Shape(NamedTuple):
    """How many pools and KV cache groups the engine has. Only the journal's header says so."""

    pools: int
    groups: int


class _Frame:
    """A frame's columns, each read from front to back.

    Reading past the end raises StopIteration, or ValueError where several values are read at once.
    """

    def __init__(
        self, payload: bytes, shape: Shape, content_ids: ContentIds, origin_ns: int
    ) -> None:
        head = _head(payload)
        since, num_ops, num_times, num_numbers, num_lists, num_ids = head[:6]
        num_hashes, num_from_blocks, codes = head[6:]
        self.shape = shape
        self._payload = payload
        self._at = FRAME.size
        self.ops = self.raw(num_ops)
        counts = (num_times, num_numbers, num_lists, num_ids)
        times, numbers, lengths, ids = map(self._column, codes.decode(), counts)
        if codes.startswith(b"I"):
            times = whole_times(times, since)
        if times and not origin_ns <= min(times) <= max(times) <= origin_ns + LONGEST_NS:
            raise ValueError("a time is not of this session")
        if max(self.ops, default=0) >> POOL_SHIFT >= max(1, shape.pools):
            raise ValueError("a pool that its header does not have")
        contents = content_ids(self.raw(num_hashes * HASH_BYTES))
        ends = list(accumulate(lengths, initial=0))
        if ends[-1] != num_ids:
            raise ValueError("its lists do not belong together")
        lists = [ids[begin:end] for begin, end in pairwise(ends)]
        self._times = iter(times)
        self._numbers = iter(numbers)
        self._lists = iter(lists[num_from_blocks:])
        self._contents = iter(contents)
        blocks = iter(lists[:num_from_blocks])
        self._columns = (self._times, self._numbers, blocks, self._lists, self._contents)
        self.time, self.number = self._times.__next__, self._numbers.__next__
        self.blocks, self.listed = blocks.__next__, self._lists.__next__

    def numbers(self, count: int) -> list[int]:
        taken = list(islice(self._numbers, count))
        if len(taken) < count:
            raise ValueError(_SHORT)
        return taken

    def lists(self, requests: int = 1) -> list[list[int]]:
        """A list for each of these requests and each group."""
        count = requests * self.shape.groups
        taken = list(islice(self._lists, count))
        if len(taken) < count:
            raise ValueError(_SHORT)
        return taken

    def contents(self, count: int) -> list[str]:
        """The content ids of the next hashes."""
        taken = list(islice(self._contents, count))
        if len(taken) < count:
            raise ValueError(_SHORT)
        return taken

    def raw(self, count: int) -> bytes:
        """The next bytes of the payload. Behind its columns come the blobs."""
        begin = self._at
        self._at += count
        if self._at > len(self._payload):
            raise ValueError(_SHORT)
        return self._payload[begin : self._at]

    def is_used_up(self) -> bool:
        left = sum(1 for column in self._columns for _ in column)
        return not left and self._at == len(self._payload)

    def _column(self, code: str, length: int) -> list[int]:
        column = array(code)
        column.frombytes(self.raw(length * column.itemsize))
        return column.tolist()


def _head(payload: bytes) -> tuple[Any, ...]:
    if not is_head(payload):
        raise ValueError("its head is damaged")
    return FRAME.unpack_from(payload)


def _cached(f: _Frame, pool: int) -> Event:
    time, number, group, tokens, stride = f.time(), *f.numbers(4)
    blocks = f.blocks()
    return time, pool, number, group, tokens, stride, blocks, f.contents(len(blocks))


def _finished(f: _Frame, pool: int) -> Event:
    time, number, prompt, output, computed, hashes, reason = f.time(), *f.numbers(6)
    return time, number, prompt, output, computed, f.contents(hashes), reason


def _captured(f: _Frame, pool: int) -> Event:
    began, ended = f.time(), f.time()
    return ended, began, f.number(), f.number()


def _resumed(f: _Frame, pool: int) -> Event:
    time, running, waiting, count = f.time(), *f.numbers(3)
    groups = f.numbers(count)
    held, again = f.listed(), f.listed()
    cached = []
    for group in groups:
        blocks = f.listed()
        cached.append((group, blocks, f.contents(len(blocks))))
    return time, pool, running, waiting, held, again, cached


def _more(f: _Frame, pool: int) -> Event:
    time, kind = f.time(), f.number()
    if kind not in _KINDS:
        raise ValueError(f"of a newer profilemate: unknown kind {kind}")
    return time, kind, f.raw(f.number())


def _assigned(f: _Frame, pool: int) -> Event:
    numbers = f.numbers(f.number())
    return numbers, f.lists(len(numbers))


_KINDS = frozenset(More)

_READERS: dict[int, Callable[[_Frame, int], Event]] = {
    Op.MORE: _more,
    Op.ALLOCATE: lambda f, pool: (f.time(), pool, f.blocks()),
    Op.REUSE: lambda f, pool: (f.time(), pool, f.blocks()),
    Op.FREE: lambda f, pool: (f.time(), pool, f.number(), f.blocks(), f.blocks()),
    Op.RELEASE: lambda f, pool: (f.time(), pool, f.number(), f.number()),
    Op.CACHE: lambda f, pool: (f.time(), pool, f.number(), f.number(), f.contents(f.number())),
    Op.CACHE_LIST: _cached,
    Op.EVICT: lambda f, pool: (f.time(), pool, f.listed()),
    Op.RESET: lambda f, pool: (f.time(), pool, f.number()),
    Op.MOVE: lambda f, pool: (f.time(), pool, f.number(), f.number()),
    Op.REQUEST: lambda f, _: (f.time(), f.number(), f.raw(f.number())),
    Op.LOOKUP: lambda f, _: (f.time(), f.number(), f.number(), f.number(), f.number()),
    Op.PREEMPT: lambda f, _: (f.time(), f.number(), f.number()),
    Op.FINISH: _finished,
    Op.PARK: lambda f, _: (f.number(), f.blocks()),
    Op.PARK_ALL: lambda f, _: (f.number(),),
    Op.ASSIGN: _assigned,
    Op.TABLE: lambda f, _: (f.number(), f.lists()),
    Op.ADMIT: lambda f, _: (f.number(), f.number(), f.lists()),
    Op.ADMIT_LOOKED_UP: lambda f, _: (f.number(), f.number(), f.number()),
    Op.STEP: lambda f, _: (f.time(), f.time(), f.numbers(5 + f.shape.pools)),
    Op.UPDATE: lambda f, _: (f.time(), f.numbers(2 + f.shape.pools)),
    Op.REPEAT: lambda f, _: (f.time(), f.number()),
    Op.FIRST_TOKEN: lambda f, _: (f.time(), f.numbers(f.number())),
    Op.GRAPH: lambda f, _: (f.time(), f.number(), f.raw(f.number())),
    Op.CAPTURE: _captured,
    Op.BATCH: lambda f, _: (f.time(), f.number(), f.raw(f.number())),
    Op.EXECUTION: lambda f, _: (f.time(), *f.numbers(7)),
    Op.REPLAY: lambda f, _: (f.time(), *f.numbers(4)),
    Op.LOST: lambda f, _: (f.time(), f.number()),
    Op.PAUSE: lambda f, _: (f.time(),),
    Op.RESUME: _resumed,
}
"""How to read each op's event from a frame's columns, given its pool. An event with a time begins
with it (a step with both, a capture with its end); its pool comes next, where it has one."""

_STEP = int(Op.STEP)
_LAST = frozenset((Op.STEP, Op.UPDATE, Op.PAUSE, Op.RESUME))
"""With these an episode ends."""
_UNTIMED = frozenset((Op.PARK, Op.PARK_ALL, Op.ASSIGN, Op.TABLE, Op.ADMIT, Op.ADMIT_LOOKED_UP))

_WITHOUT_POOL = bytes(byte & OP_MASK for byte in range(256))


def span(payload: bytes) -> tuple[int, int]:
    """The time that an events frame gives for the frame before it, and that of its own last event,
    which the frame behind it gives in turn.

    Raises:
        DecodeError: the frame is not as long as it says.

    """
    try:
        since, num_ops, num_times, *_, codes = _head(payload)
        if not num_times:
            return since, since
        width, code = (8, "<q") if codes.startswith(b"q") else (4, "<I")
        (last,) = struct.unpack_from(code, payload, FRAME.size + num_ops + (num_times - 1) * width)
    except (ValueError, struct.error) as error:
        raise DecodeError(f"events frame: {error}") from None
    return since, last if width == 8 else whole_times([last], since)[0]


_WITH_BLOB = frozenset((Op.MORE, Op.REQUEST, Op.GRAPH, Op.BATCH))


def may_begin(begun: bytes, length: int) -> bool:
    """Whether an events frame of this length may begin like this, as far as it is there."""
    if len(begun) < FRAME.size:
        return True
    if not is_head(begun):
        return False
    _, num_ops, *counts, num_hashes, num_from_blocks, codes = FRAME.unpack_from(begun)
    ops = begun[FRAME.size : FRAME.size + num_ops]
    widths = [array(code).itemsize for code in codes.decode()]
    columns = sum(map(mul, counts, widths)) + num_ops + num_hashes * HASH_BYTES
    left = length - FRAME.size - columns
    if left < 0 or num_from_blocks > counts[2]:
        return False
    has_blob = not _WITH_BLOB.isdisjoint(ops.translate(_WITHOUT_POOL))
    return left == 0 or has_blob or len(ops) < num_ops


def episodes(
    payload: bytes, shape: Shape, content_ids: ContentIds, origin_ns: int = 0
) -> list[Episode]:
    """The events of a frame by episodes. No event comes before second 0, ``origin_ns``.

    Raises:
        DecodeError: the frame is not as long as it says, or names an unknown op.

    """
    try:
        frame = _Frame(payload, shape, content_ids, origin_ns)
        ops = frame.ops.translate(_WITHOUT_POOL)
        pairs = zip(ops, frame.ops, strict=True)
        events = [_READERS[op](frame, byte >> POOL_SHIFT) for op, byte in pairs]
        if not frame.is_used_up():
            raise ValueError("its columns do not belong together")
    except StopIteration:
        raise DecodeError(f"events frame: {_SHORT}") from None
    except KeyError as error:
        raise DecodeError(f"events frame: of a newer profilemate: unknown op {error}") from None
    except (ValueError, struct.error) as error:
        raise DecodeError(f"events frame: {error}") from None
    found: list[Episode] = []
    time = begin = 0
    for at, op in enumerate(ops, 1):
        if op in _LAST:
            time = events[at - 1][op == _STEP]
            found.append(Episode(time, ops[begin:at], events[begin:at]))
            begin = at
    if begin < len(ops):
        tail = zip(ops[begin:], events[begin:], strict=True)
        times = [event[0] for op, event in tail if op not in _UNTIMED]
        # Not the last one's time: a worker whose GPU is timed records an execution late.
        found.append(Episode(max(times, default=time), ops[begin:], events[begin:]))
    return found
