# SPDX-License-Identifier: Apache-2.0
"""Take an events frame apart, as profilemate.events lays it out."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from profilemate.events import (
    COUNT_SHIFT,
    EVENTS_HEAD,
    HASH_BYTES,
    OP_MASK,
    POOL_MASK,
    POOL_SHIFT,
    Op,
)


@dataclass(frozen=True, slots=True)
class Event:
    """One event: ``args`` are its fixed operands, ``ids`` the n that its head counts."""

    op: int
    count: int
    pool: int
    time: int
    until: int
    args: list[int]
    ids: list[int]
    hashes: list[int]
    blob: bytes


class DecodeError(Exception):
    """The frame is not laid out as it says."""


# op: fixed operands before the ids, whether n ids follow, times, whether n hashes, whether a blob
_LAYOUT: dict[int, tuple[int, bool, int, bool, bool]] = {
    Op.ALLOCATE: (0, True, 1, False, False),
    Op.REUSE: (0, True, 1, False, False),
    Op.FREE: (1, True, 1, False, False),
    Op.CACHE: (4, True, 1, True, False),
    Op.EVICT: (0, True, 1, False, False),
    Op.RESET: (0, False, 1, False, False),
    Op.MOVE: (2, False, 1, False, False),
    Op.REQUEST: (1, False, 1, False, True),
    Op.LOOKUP: (3, False, 1, False, False),
    Op.PREEMPT: (2, False, 1, False, False),
    Op.FINISH: (1, False, 1, False, True),
    Op.PARK: (1, True, 0, False, False),
    Op.ASSIGN: (2, True, 0, False, False),
    Op.TABLE: (2, True, 0, False, False),
    Op.ADMIT: (2, False, 0, False, False),
    Op.STEP: (5, True, 2, False, False),
    Op.UPDATE: (2, True, 1, False, False),
    Op.REPEAT: (0, False, 1, False, False),
    Op.FIRST_TOKEN: (0, True, 1, False, False),
}


def decode(payload: bytes) -> list[Event]:
    """The events of a frame, in order.

    Raises:
        DecodeError: the frame ends too early or names an unknown op.

    """
    try:
        return list(_events(payload))
    except (IndexError, KeyError, ValueError) as error:
        raise DecodeError(f"events frame: {error}") from None


def last_time(payload: bytes) -> int:
    """Monotonic time of the frame's last timed event, in nanoseconds."""
    count = EVENTS_HEAD.unpack_from(payload)[0]
    end = EVENTS_HEAD.size + 8 * count
    return int.from_bytes(payload[end - 8 : end], "little")


def _events(payload: bytes) -> Iterator[Event]:
    num_times, num_hashes, num_words, num_bytes = EVENTS_HEAD.unpack_from(payload)
    times_end = EVENTS_HEAD.size + 8 * num_times
    hashes_end = times_end + HASH_BYTES * num_hashes
    words_end = hashes_end + 4 * num_words
    if words_end + num_bytes != len(payload):
        raise ValueError("its length does not add up")
    times = array("q", payload[EVENTS_HEAD.size : times_end]).tolist()
    hashes = array("Q", payload[times_end:hashes_end]).tolist()
    words = array("I", payload[hashes_end:words_end]).tolist()
    at = next_time = next_hash = 0
    next_blob = words_end
    while at < num_words:
        word = words[at]
        op, count = word & OP_MASK, word >> COUNT_SHIFT
        fixed, counted, timed, hashed, has_blob = _LAYOUT[op]
        args_end = at + 1 + fixed
        ids_end = args_end + count if counted else args_end
        if ids_end > num_words:
            raise ValueError("an event is cut off")
        time = times[next_time] if timed else 0
        until = times[next_time + timed - 1] if timed else 0
        next_time += timed
        event_hashes: list[int] = []
        if hashed:
            event_hashes = hashes[next_hash : next_hash + count]
            next_hash += count
        blob = b""
        if has_blob:
            blob = payload[next_blob : next_blob + count]
            next_blob += count
        yield Event(
            op,
            count,
            word >> POOL_SHIFT & POOL_MASK,
            time,
            until,
            words[at + 1 : args_end],
            words[args_end:ids_end],
            event_hashes,
            blob,
        )
        at = ids_end
