# SPDX-License-Identifier: Apache-2.0
"""A small session, written by hand, whose every figure can be worked out on paper.

Blocks have 16 tokens, the session 10 s, the pool 100 blocks. Contents are numbered by hand.

===== ======== ======= ============== =======================================================
who   runs     prompt  contents       what it found
===== ======== ======= ============== =======================================================
A     1 to 2   50      1 2 3          nothing
A2    2.5-2.75 50      1 2 3          1 2 3, which A had computed
S     3 to 4   65      11 12 13 14    nothing, and evicts 2 and 3 (and 77, of nobody)
B     5 to 6   70      1 2 3 4        1; 2 and 3 were gone since second 3; evicts 11
C     8 to 9   65      1 2 3 9        1 2 3, which B had computed again; evicts a copy of 4
===== ======== ======= ============== =======================================================
"""

from __future__ import annotations

from typing import Any

from tests.analysis.builder import SessionBuilder


def request(
    name: str, began: float, ended: float, tokens: int, contents: list[int], hit: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows of a request that gives one token: its lookup, and the request itself."""
    lookup = {
        "timestamp_sec": began,
        "request_id": name,
        "query_tokens": tokens,
        "hit_tokens": hit,
    }
    row = {
        "timestamp": 1e3 * began,
        "request_id": name,
        "input_length": tokens,
        "output_length": 1,
        "block_size": 16,
        # The last partial block has a number of its own.
        "hash_ids": [*contents, 900 + round(began * 10)],
        "output_hash_ids": [],
        "hit_tokens": hit,
        "preemptions": 0,
        "first_token_sec": (began + ended) / 2,
        "finish_sec": ended,
        "finish_reason": "length",
        "computed_tokens": tokens,
    }
    return lookup, row


def swept(session: SessionBuilder) -> None:
    """The session of the table above."""
    requests = [
        request("A", 1, 2, 50, [1, 2, 3], 0),
        request("A2", 2.5, 2.75, 50, [1, 2, 3], 48),
        request("S", 3, 4, 65, [11, 12, 13, 14], 0),
        request("B", 5, 6, 70, [1, 2, 3, 4], 16),
        request("C", 8, 9, 65, [1, 2, 3, 9], 48),
    ]
    session.lookups(*(lookup for lookup, _ in requests))
    session.requests(*(row for _, row in requests))
    session.usage((0, 0))
    session.evictions(
        {"timestamp_sec": 3.001, "content_id": 3, "evicting_request": "S", "idle_sec": 0.5}
        | {"reuse_count": 1, "owner_request": "A2", "evictable_sec": 0.25},
        {"timestamp_sec": 3.001, "content_id": 2, "evicting_request": "S", "idle_sec": 0.5}
        | {"reuse_count": 1, "owner_request": "A2", "evictable_sec": 0.25},
        {"timestamp_sec": 3.5, "content_id": 77, "evicting_request": "S", "idle_sec": 2.5}
        | {"origin": "output", "owner_request": "gone", "evictable_sec": 2.5},
        {"timestamp_sec": 5.001, "content_id": 11, "evicting_request": "B", "idle_sec": 3}
        | {"owner_request": "S", "evictable_sec": 1},
        {"timestamp_sec": 8.001, "content_id": 4, "evicting_request": "C", "idle_sec": 4}
        | {"copies_left": 1, "reuse_count": 5, "owner_request": "B", "evictable_sec": 2},
    )
