# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from analysis import open_session, summarize
from analysis.prefix.rent import Rent, Renter
from tests.analysis.builder import SessionBuilder
from tests.analysis.stories import request


def rent_of(session: SessionBuilder, after_sec: float = 0.0) -> Rent:
    return summarize(open_session(session.folder, after_sec=after_sec)).rent


def two_that_share(session: SessionBuilder, *more: tuple[float, str, int, str]) -> None:
    """long holds 2 blocks from second 1 and 3 from second 3, until 5; its first token comes in
    second 2. short finds the first two in second 4 and holds them until 6; its first token comes
    in 4.5. In second 8, long's third block is evicted. late has not ended: 3 blocks from 7 on."""
    session.lookups(
        {"timestamp_sec": 1, "request_id": "long", "query_tokens": 34, "hit_tokens": 0},
        {"timestamp_sec": 4, "request_id": "short", "query_tokens": 33, "hit_tokens": 32},
        {"timestamp_sec": 7, "request_id": "late", "query_tokens": 40, "hit_tokens": 0},
    )
    common: dict[str, Any] = {"block_size": 16, "preemptions": 0}
    session.requests(
        {"request_id": "long", "timestamp": 1000, "input_length": 34, "hash_ids": [1, 2, 901]}
        | {"output_length": 15, "output_hash_ids": [3], "computed_tokens": 48}
        | {"first_token_sec": 2, "finish_sec": 5, **common},
        {"request_id": "short", "timestamp": 4000, "input_length": 33, "hash_ids": [1, 2, 902]}
        | {"output_length": 1, "output_hash_ids": [], "computed_tokens": 33}
        | {"first_token_sec": 4.5, "finish_sec": 6, **common},
    )
    moves = [
        (1, "allocate", 2, "long"),
        (3, "allocate", 1, "long"),
        (4, "reuse", 2, "short"),
        (5, "free", 1, "long"),
        (6, "free", 2, "short"),
        (7, "allocate", 3, "late"),
    ]
    columns = ("timestamp_sec", "event", "num_blocks", "request_id")
    session.rows(
        "kv_cache_allocations.csv",
        *(dict(zip(columns, move, strict=True)) for move in sorted([*moves, *more])),
    )
    # As many cached as held: none free is counted here.
    session.usage((1, 2), (3, 3), (5, 2), (6, 0), (7, 3))
    session.evictions(
        {"timestamp_sec": 8, "content_id": 3, "owner_request": "long", "evictable_sec": 3},
        # Held until it was evicted: it had not been kept.
        {"timestamp_sec": 9, "content_id": 4, "owner_request": "late", "reason": "explicit"},
    )


def test_rent_by_request_and_phase(session: SessionBuilder) -> None:
    """long: 2 x 1 s until its token, then 2 x 3 + 1 x 2; short: 2 x 0.5, then 2 x 1.5; late: 3 x 3.
    Of long's blocks, short found two: 32 tokens."""
    two_that_share(session)
    rent = rent_of(session)
    assert rent.exact
    assert rent.top == (
        Renter("long", 0, 2, 8, 0, 3, 13, 32),
        Renter("late", 0, 0, 0, 9, 0, 9, None),
        Renter("short", 0, 1, 3, 0, 0, 4, 0),
    )
    assert (rent.renters, rent.waiting, rent.decoding, rent.running) == (3, 3, 11, 9)


def test_what_the_pool_held_and_kept(session: SessionBuilder) -> None:
    """Held: 2 x 2 + 3 x 2 + 2 x 1 + 3 x 3. From 4 to 5, two blocks are paid for twice."""
    two_that_share(session)
    rent = rent_of(session)
    assert rent.pool_held == 21
    assert rent.shared == 2
    # In these rows as many blocks are kept as are held.
    assert (rent.pool_kept, rent.kept_until_evicted) == (21, 3)
    assert rent.saved_tokens == 32
    assert rent.saved_per_kept == pytest.approx(32 / 21)


def test_rent_of_the_warm_up_is_left_out(session: SessionBuilder) -> None:
    """From second 4.75 on: long pays 3 x 0.25, short 2 x 1.25, late as before; of the three seconds
    that the evicted block was kept, all came after."""
    two_that_share(session)
    rent = rent_of(session, after_sec=4.75)
    assert [(renter.request_id, renter.total) for renter in rent.top] == [
        ("late", 9),
        ("long", 3.75),
        ("short", 2.5),
    ]
    assert rent.pool_held == pytest.approx(0.25 * 3 + 2 + 9)
    assert rent.shared == pytest.approx(0.5)
    # From 6.5 on the evicted block was kept for 1.5 s more.
    late, long = rent_of(session, after_sec=6.5).top
    assert (late.total, long.kept, long.total) == (9, 1.5, 1.5)


def test_a_copy_is_not_shared(session: SessionBuilder) -> None:
    """Both compute the same block at the same time: each has its own."""
    for name in ("one", "two"):
        lookup, row = request(name, 1, 3, 17, [1], 0)
        session.lookups(lookup)
        session.requests(row)
        session.rows(
            "kv_cache_allocations.csv",
            {"event": "allocate", "num_blocks": 2, "request_id": name},
        )
    rent = rent_of(session)
    assert (rent.waiting + rent.decoding, rent.shared) == (8, 0)


def test_groups_without_full_attention_make_it_approximate(session: SessionBuilder) -> None:
    """A window slides on: in second 2.5 long lets go of one block, which it no longer pays for."""
    two_that_share(session, (2.5, "free", 1, "long"))
    session.metadata(
        groups=[
            {"kind": "FullAttentionSpec", "block_size": 16},
            {"kind": "SlidingWindowSpec", "block_size": 16},
        ]
    )
    rent = rent_of(session)
    assert not rent.exact
    assert rent.top[0].decoding == 8 - 2.5


@pytest.mark.usefixtures("small_chunks")
def test_rent_is_the_same_in_chunks(session: SessionBuilder) -> None:
    two_that_share(session)
    session.rows(
        "kv_cache_allocations.csv",
        *({"timestamp_sec": 9, "event": "cache", "num_blocks": 1} for _ in range(500)),
        {"timestamp_sec": 9.5, "event": "allocate", "num_blocks": 4, "request_id": "late"},
    )
    assert rent_of(session).running == 9 + 4 * 0.5


def test_without_an_allocation_nobody_pays(session: SessionBuilder) -> None:
    rent = rent_of(session)
    assert (rent.renters, rent.top, rent.pool_held, rent.saved_per_kept) == (0, (), 0, None)
