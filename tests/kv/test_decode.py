# SPDX-License-Identifier: Apache-2.0
"""A frame of events comes apart as it was put together, or is refused whole."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest

from profilemate.collector.contents import content_ids
from profilemate.collector.decode import DecodeError, Episode, Shape, episodes
from profilemate.format.events import FRAME, HASH_BYTES, Columns, Op, op_of
from profilemate.record.encode import more

SHAPE = Shape(pools=2, groups=2)
EARLIER = 5_000_000_000
HASHES = [bytes([number]) * 32 for number in (1, 2, 3)]
IDS = content_ids(b"secret" * 5)


def blocks(*ids: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(block_id=number) for number in ids]


def two_episodes() -> Columns:
    """A step of two requests in two groups and pools, and what came after it."""
    log = Columns()
    log.ops += [
        *(Op.REQUEST, op_of(Op.ALLOCATE, 1), op_of(Op.CACHE_LIST, 1), Op.ASSIGN, Op.STEP),
        *(Op.FINISH, op_of(Op.FREE, 1), Op.PARK),
    ]
    log.times += [EARLIER + number for number in range(1, 8)]
    log.numbers += [
        *(7, 3),  # REQUEST
        *(7, 1, 32, 16),  # CACHE_LIST
        *(2, 7, 8),  # ASSIGN
        *(2, 0, 40, 32, 2, 90, 91),  # STEP
        *(7, 32, 4, 35, 1, 0),  # FINISH
        *(8,),  # FREE
        *(8,),  # PARK
    ]
    log.blocks += [blocks(70_000, 5), blocks(70_000, 5), blocks(5), blocks(), blocks(6)]
    log.ids += [[1], [70_000], [2, 3], [5]]
    log.hashes += HASHES
    log.blobs += [b"abc"]
    return log


def test_frame_comes_apart() -> None:
    first, second, third = IDS(b"".join(part[:HASH_BYTES] for part in HASHES))
    at = [EARLIER + number for number in range(8)]
    step = [
        (at[1], 7, b"abc"),
        (at[2], 1, [70_000, 5]),
        (at[3], 1, 7, 1, 32, 16, [70_000, 5], [first, second]),
        ([7, 8], [[1], [70_000], [2, 3], [5]]),
        (at[4], at[5], [2, 0, 40, 32, 2, 90, 91]),
    ]
    after = [(at[6], 7, 32, 4, 35, [third], 0), (at[7], 1, 8, [5], []), (8, [6])]
    assert episodes(two_episodes().pack(EARLIER), SHAPE, IDS) == [
        Episode(
            at[5],
            bytes((Op.REQUEST, Op.ALLOCATE, Op.CACHE_LIST, Op.ASSIGN, Op.STEP)),
            step,
        ),
        Episode(at[7], bytes((Op.FINISH, Op.FREE, Op.PARK)), after),
    ]


@pytest.mark.parametrize("shape", [Shape(1, 2), Shape(2, 1), Shape(3, 2)])
def test_frame_of_another_engine_is_refused(shape: Shape) -> None:
    with pytest.raises(DecodeError):
        episodes(two_episodes().pack(EARLIER), shape, IDS)


def test_frame_of_another_length_is_refused() -> None:
    payload = two_episodes().pack(EARLIER)
    with pytest.raises(DecodeError):
        episodes(payload + b"\0", SHAPE, IDS)
    for length in range(len(payload)):
        with pytest.raises(DecodeError):
            episodes(payload[:length], SHAPE, IDS)


@pytest.mark.parametrize("field", range(1, 8))
@pytest.mark.parametrize("by", [-1, 1])
def test_frame_whose_head_is_wrong_is_refused(field: int, by: int) -> None:
    payload = two_episodes().pack(EARLIER)
    head = list(FRAME.unpack_from(payload))
    head[field] += by
    with pytest.raises(DecodeError):
        episodes(FRAME.pack(*head) + payload[FRAME.size :], SHAPE, IDS)


@pytest.mark.parametrize("number", [1, 6, 20], ids=["blob", "requests", "hashes"])
def test_frame_that_announces_more_than_it_has_is_refused(number: int) -> None:
    log = two_episodes()
    log.numbers[number] += 1
    with pytest.raises(DecodeError):
        episodes(log.pack(EARLIER), SHAPE, IDS)


def test_lists_longer_than_all_ids_are_refused() -> None:
    payload = bytearray(two_episodes().pack(EARLIER))
    _, ops, times, numbers, lists, *_ = FRAME.unpack_from(payload)
    payload[FRAME.size + ops + 4 * times + 2 * numbers + 2 * (lists - 1)] += 1
    with pytest.raises(DecodeError):
        episodes(bytes(payload), SHAPE, IDS)


def test_unknown_kind_is_refused() -> None:
    log = Columns()
    more(log, (more, Op.MORE, EARLIER, 99, []))
    with pytest.raises(DecodeError, match="of a newer profilemate: unknown kind 99"):
        episodes(log.pack(EARLIER), SHAPE, IDS)


def test_content_ids_stand_for_hashes() -> None:
    numbers = list(range(1_000))
    ids = IDS(struct.pack("<1000Q", *numbers))
    assert len(set(ids)) == 1_000
    assert all(0 <= int(number) < 1 << 53 for number in ids)
    # The place of a hash among others is no part of its id; the session's secret is.
    assert IDS(struct.pack("<Q", 999)) == ids[-1:]
    assert not set(ids) & set(content_ids(b"another")(struct.pack("<1000Q", *numbers)))
