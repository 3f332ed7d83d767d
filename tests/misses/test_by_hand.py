# SPDX-License-Identifier: Apache-2.0
"""Small sessions whose right answer is plain from the story of each test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import open_session, summarize
from analysis.prefix.miss_summary import Missed, MissReasons
from analysis.renderers.text import summary as text
from tests.analysis.builder import METADATA, SessionBuilder


@pytest.fixture
def session(tmp_path: Path) -> SessionBuilder:
    """A complete session of an engine with blocks of 16 tokens, without a table."""
    return SessionBuilder(tmp_path / "session")


def request(name: str, begin: float, end: float, contents: list[int], **other: Any) -> Any:
    """A request that arrives when it is looked up; its prompt is these full blocks and 2 tokens."""
    return {
        "request_id": name,
        "timestamp": begin * 1e3,
        "input_length": 16 * len(contents) + 2,
        "output_length": 3,
        "block_size": 16,
        "hash_ids": [*contents, 900 + hash(name) % 50],
        "first_token_sec": begin + 0.2,
        "finish_sec": end,
        "finish_reason": "length",
        "computed_tokens": 16 * len(contents) + 4,
        **other,
    }


def lookup(name: str, time: float, blocks: int, hit: int = 0, **other: Any) -> Any:
    """The lookup of a request whose prompt is so many full blocks and 2 tokens."""
    return {
        "request_id": name,
        "timestamp_sec": time,
        "query_tokens": 16 * blocks + 2,
        "hit_tokens": 16 * hit,
        **other,
    }


def eviction(time: float, content: int, by: str, **other: Any) -> Any:
    return {"timestamp_sec": time, "content_id": content, "evicting_request": by, **other}


def allocation(time: float, blocks: int, by: str) -> Any:
    return {"timestamp_sec": time, "event": "allocate", "num_blocks": blocks, "request_id": by}


def missed(session: SessionBuilder) -> MissReasons:
    return summarize(open_session(session.folder)).misses


def evicted_prompt(session: SessionBuilder) -> None:
    """a leaves blocks 11, 12, 13; b takes the place of 13 and 12, c that of 11; then d asks."""
    session.requests(
        request("a", 1, 2, [11, 12, 13]),
        request("b", 3, 3.5, [21]),
        request("c", 4, 5, [31, 32, 33, 34]),
        request("d", 10, 11, [11, 12, 13]),
    )
    session.lookups(lookup("a", 1, 3), lookup("b", 3, 1), lookup("c", 4, 4), lookup("d", 10, 3))
    session.rows(
        "kv_cache_allocations.csv",
        allocation(1.001, 4, "a"),
        allocation(3.001, 2, "b"),
        allocation(4.001, 5, "c"),
        allocation(10.001, 4, "d"),
    )
    session.evictions(eviction(3.001, 13, "b"), eviction(3.001, 12, "b"), eviction(4.001, 11, "c"))


def test_evicted_before(session: SessionBuilder) -> None:
    evicted_prompt(session)
    found = missed(session)
    assert found.by_reason == {
        "compulsory": Missed(blocks=8, tokens=128, requests=3),
        "capacity": Missed(blocks=3, tokens=48, requests=1),
    }
    assert found.partial_tokens == 4 * 2
    # 11 full blocks and 4 ends of 2 tokens were computed, 3 blocks of them again.
    assert found.recomputed_tokens == 48
    assert found.recomputed_share == 48 / (11 * 16 + 8)
    assert found.ceiling == 48 / (11 * 16 + 8)


def test_what_would_have_found_it(session: SessionBuilder) -> None:
    evicted_prompt(session)
    found = missed(session)
    # Block 11 went 5.999 s before, when c took 5 blocks; 12 and 13 when b took 2.
    (costly,) = found.costliest
    assert (costly.request_id, costly.tokens, costly.evicted_by) == ("d", 48, "c")
    assert costly.late_sec == pytest.approx(5.999)
    assert costly.more_blocks == 2 + 5
    assert found.short.blocks == 3
    assert (found.short.more_blocks_p50, found.short.more_blocks_max) == (7, 7)
    assert found.short.late_p50_sec == pytest.approx(6.999)


def test_more_blocks_than_hold_everything_are_of_no_use(session: SessionBuilder) -> None:
    """The requests computed 3, 1 and 4 contents, and held 5 of 8 blocks at the peak: 5 blocks more
    hold it all. Block 11 needs as many by its eviction, 12 and 13 would need 7."""
    evicted_prompt(session)
    state = {"usage_pct": 62.5, "num_blocks": 5, "total_blocks": 8}
    session.rows(
        "kv_cache_usage.csv", {"timestamp_sec": 4, "cached_blocks": 3, "free_blocks": 0, **state}
    )
    summary = summarize(open_session(session.folder))
    short = summary.misses.short
    assert (short.more_blocks_p50, short.more_blocks_max, short.bounded) == (5, 5, 2)
    assert summary.misses.costliest[0].more_blocks == 5
    said = " ".join(text.render(summary).split())
    assert "For 2 blocks that is the most that can be of use: a pool that holds" in said
    # What a request that has not ended computed is not known.
    session.lookups(lookup("e", 11, 1))
    assert (missed(session).short.more_blocks_max, missed(session).short.bounded) == (7, 0)


def test_warm_up_is_left_out_but_remembered(session: SessionBuilder) -> None:
    evicted_prompt(session)
    found = summarize(open_session(session.folder, after_sec=9)).misses
    assert found.by_reason == {"capacity": Missed(blocks=3, tokens=48, requests=1)}


def test_a_copy_that_is_left_is_out_of_reach_and_not_lost(session: SessionBuilder) -> None:
    session.requests(request("a", 1, 2, [11, 12]), request("b", 5, 6, [11, 12]))
    session.lookups(lookup("a", 1, 2), lookup("b", 5, 2))
    session.evictions(eviction(3, 11, "x"), eviction(3, 12, "x", copies_left=1))
    found = missed(session).by_reason
    assert found["capacity"] == found["behind"] == Missed(1, 16, 1)


def test_a_copy_that_is_left_is_no_loss(session: SessionBuilder) -> None:
    # The first block's content was in two blocks; the second one's was not.
    session.requests(request("a", 1, 2, [11, 12]), request("b", 5, 6, [11, 12]))
    session.lookups(lookup("a", 1, 2), lookup("b", 5, 2, hit=1))
    session.evictions(eviction(3, 11, "x", copies_left=1), eviction(3, 12, "x"))
    assert missed(session).by_reason["capacity"] == Missed(1, 16, 1)


def test_being_computed(session: SessionBuilder) -> None:
    # b comes while a has computed the first of three blocks, c after a's first token.
    session.requests(
        request("a", 1, 9, [11, 12, 13], first_token_sec=3),
        request("b", 2, 9, [11, 12, 13], first_token_sec=4),
        request("c", 5, 9, [11, 12, 13]),
    )
    session.lookups(lookup("a", 1, 3), lookup("b", 2, 3, hit=1), lookup("c", 5, 3, hit=3))
    assert missed(session).by_reason == {
        "compulsory": Missed(3, 48, 1),
        "not yet cached": Missed(2, 32, 1),
    }


def test_what_an_aborted_request_did_not_compute_was_never_there(session: SessionBuilder) -> None:
    session.requests(
        request(
            "a", 1, 2, [11, 12], first_token_sec=None, computed_tokens=16, finish_reason="abort"
        ),
        request("b", 3, 4, [11, 12]),
    )
    session.lookups(lookup("a", 1, 2), lookup("b", 3, 2, hit=1))
    assert missed(session).by_reason == {"compulsory": Missed(3, 48, 2)}


def test_behind_a_missing_block(session: SessionBuilder) -> None:
    session.requests(request("a", 1, 2, [11, 12, 13]), request("b", 5, 6, [11, 12, 13]))
    session.lookups(lookup("a", 1, 3), lookup("b", 5, 3, hit=1))
    session.evictions(eviction(3, 12, "x"))
    found = missed(session).by_reason
    assert found["capacity"] == found["behind"] == Missed(1, 16, 1)


def test_an_earlier_answer_is_content_too(session: SessionBuilder) -> None:
    # a's prompt and answer fill block 12, which the next turn of the conversation asks for.
    session.requests(
        request("a", 1, 2, [11], output_hash_ids=[12], output_length=20, computed_tokens=37),
        request("b", 5, 6, [11, 12]),
    )
    session.lookups(lookup("a", 1, 1), lookup("b", 5, 2, hit=1))
    session.evictions(eviction(3, 12, "x", origin="output"))
    assert missed(session).by_reason["capacity"] == Missed(1, 16, 1)


def test_the_last_token_and_the_last_block(session: SessionBuilder) -> None:
    # 32 tokens are two full blocks, and the second holds the last token.
    exact = {"input_length": 32, "hash_ids": [11, 12], "computed_tokens": 34}
    session.requests(request("a", 1, 2, [11, 12], **exact), request("b", 5, 6, [11, 12], **exact))
    session.lookups(lookup("a", 1, 2, query_tokens=32), lookup("b", 5, 2, hit=1, query_tokens=32))
    found = missed(session)
    assert found.by_reason == {"last token": Missed(2, 32, 2), "compulsory": Missed(1, 16, 1)}
    assert found.partial_tokens == 0


def test_speculation_gives_the_last_block_of_a_hit_up(session: SessionBuilder) -> None:
    session.metadata(scheduler={"drops_hit_unit": True})
    session.requests(request("a", 1, 2, [11, 12, 13]), request("b", 5, 6, [11, 12, 13]))
    session.lookups(lookup("a", 1, 3), lookup("b", 5, 3, hit=2))
    assert missed(session).by_reason["speculation"] == Missed(1, 16, 1)


@pytest.mark.parametrize(("evicted_at_sec", "reason"), [(None, "other rank"), (4.0, "compulsory")])
def test_another_rank(session: SessionBuilder, evicted_at_sec: float | None, reason: str) -> None:
    # The second turn goes to rank 1, while rank 0 still has, or has no more, what it needs.
    session.requests(request("a", 1, 2, [11, 12], engine=0), request("b", 5, 6, [11, 12], engine=1))
    session.lookups(lookup("a", 1, 2, engine=0), lookup("b", 5, 2, engine=1))
    if evicted_at_sec is not None:
        session.evictions(
            *(eviction(evicted_at_sec, content, "x", engine=0) for content in (11, 12))
        )
    found = missed(session).by_reason
    assert found[reason].blocks == 2 + 2 * (reason == "compulsory")


def test_held_back_by_another_group(session: SessionBuilder) -> None:
    # The group of full attention has both blocks; the sliding window has lost the second.
    session.metadata(
        groups=[
            {"kind": "FullAttentionSpec", "block_size": 16},
            {"kind": "SlidingWindowSpec", "block_size": 16},
        ]
    )
    session.requests(request("a", 1, 2, [11, 12]), request("b", 5, 6, [11, 12]))
    session.lookups(lookup("a", 1, 2), lookup("b", 5, 2, hit=1))
    session.evictions(eviction(3, 12, "x", group=1))
    found = missed(session)
    assert found.by_reason["held back"] == Missed(1, 16, 1)
    assert found.held_back_by == {1: 1}


def test_a_request_that_has_not_ended(session: SessionBuilder) -> None:
    session.requests(request("a", 1, 2, [11, 12]))
    session.lookups(lookup("a", 1, 2), lookup("b", 5, 4, hit=2))
    found = missed(session)
    assert found.unknown_requests == 1
    assert found.by_reason["unknown"] == Missed(0, 34, 1)


@pytest.mark.parametrize("fields", [{"block_size": None}, {"block_size": 0}, {"hash_ids": []}])
def test_a_request_whose_contents_are_not_known(
    session: SessionBuilder, fields: dict[str, Any]
) -> None:
    session.requests(request("a", 1, 2, [11, 12]), request("b", 5, 6, [11, 12], **fields))
    session.lookups(lookup("a", 1, 2), lookup("b", 5, 2))
    found = missed(session)
    assert found.unknown_requests == 1
    assert found.by_reason["unknown"] == Missed(0, 34, 1)


def test_a_request_id_used_again_is_another_request(session: SessionBuilder) -> None:
    session.requests(request("a", 1, 2, [11, 12]), request("a", 5, 6, [21, 22, 23]))
    session.lookups(lookup("a", 1, 2), lookup("a", 5, 3))
    assert missed(session).by_reason == {"compulsory": Missed(5, 80, 2)}


@pytest.mark.parametrize("name", ["=1+1", "a\nb", "-x", 'q"1"'])
def test_names_that_the_tables_escape(session: SessionBuilder, name: str) -> None:
    from profilemate.collector.tables import text_cell

    session.metadata(**METADATA)
    session.requests(request(name, 1, 2, [11, 12]))
    session.lookups(lookup("x", 1, 2))
    path = session.folder / "prefix_cache_lookups.csv"
    path.write_text(path.read_text().replace(",x,", f",{text_cell(name)},"))
    assert missed(session).unknown_requests == 0
