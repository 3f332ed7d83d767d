# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from analysis import open_session, summarize
from tests.analysis.builder import SessionBuilder
from tests.analysis.graphs import mixed
from tests.analysis.invoke import invoke
from tests.misses.test_by_hand import allocation, eviction, lookup, request


def whole(session: SessionBuilder) -> None:
    """Two requests, the second of which took the place of a block of the first."""
    session.requests(request("a", 1, 2, [11, 12]), request("b", 5, 6, [21, 22]))
    session.lookups(lookup("a", 1, 2), lookup("b", 5, 2))
    session.rows(
        "kv_cache_allocations.csv",
        allocation(1.1, 3, "a"),
        {**allocation(5.1, 3, "b"), "evicted_blocks": 1},
    )
    session.evictions(eviction(5.1, 12, "b"), eviction(7, 22, "", reason="explicit"))
    session.usage((1.1, 3), (2, 0), (5.1, 3), (6, 0))
    session.rows(
        "scheduler_steps.csv",
        *({"timestamp_sec": time, "scheduled_tokens": 34} for time in (1.1, 5.1)),
    )


def warnings(session: SessionBuilder) -> tuple[str, ...]:
    return summarize(open_session(session.folder)).warnings


def test_a_whole_session_has_no_warning(session: SessionBuilder) -> None:
    whole(session)
    assert warnings(session) == ()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("kv_cache_allocations.csv", "has 0 evictions by allocations"),
        ("kv_cache_evictions.csv", "kv_cache_evictions.csv has 0"),
        ("kv_cache_usage.csv", "kv_cache_usage.csv is missing"),
        ("requests.jsonl", "requests.jsonl is missing or empty, though 2 requests were admitted"),
        ("prefix_cache_lookups.csv", "prefix_cache_lookups.csv has 0 that were admitted"),
        ("scheduler_steps.csv", "scheduler_steps.csv is missing"),
    ],
)
def test_a_table_that_was_taken_away_is_noticed(
    session: SessionBuilder, table: str, said: str
) -> None:
    whole(session)
    (session.folder / table).unlink()
    (warning,) = warnings(session)
    assert said in warning


def test_requests_that_came_in_the_warm_up_are_not_missed(session: SessionBuilder) -> None:
    session.requests(request("a", 1, 9, [11, 12]))
    session.lookups(lookup("a", 3, 2))
    assert summarize(open_session(session.folder, after_sec=2)).warnings == ()


def test_a_table_that_was_cut_is_noticed(session: SessionBuilder) -> None:
    whole(session)
    path = session.folder / "kv_cache_evictions.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))
    assert "rows are missing in one of them" in warnings(session)[0]


def test_a_session_that_is_not_complete_need_not_fit(session: SessionBuilder) -> None:
    whole(session)
    session.metadata(complete=False, ended_at=None)
    (session.folder / "kv_cache_usage.csv").unlink()
    assert not any("is missing, though" in warning for warning in warnings(session))


def test_tables_that_are_gone_altogether_are_noticed(session: SessionBuilder) -> None:
    whole(session)
    written = sum(file.stat().st_size for file in session.folder.glob("[!m]*"))
    session.metadata(cost={"table_bytes": written})
    assert warnings(session) == ()
    for file in session.folder.glob("[!m]*"):
        file.unlink()
    said = f"{written:,} bytes of tables, and 0 are there: tables are missing"
    assert said in warnings(session)[0]
    result = invoke("summary", session.folder)
    assert said in " ".join(" ".join(result.stdout.splitlines()[:6]).split())


def test_executions_in_graphs_without_a_replay(session: SessionBuilder) -> None:
    mixed(session)
    assert warnings(session) == ()
    (session.folder / "cuda_graph_usage.csv").unlink()
    assert warnings(session) == (
        (
            "cuda_graph_timeline.csv has 18 executions in graphs, and cuda_graph_usage.csv has no "
            "replay: rows are missing in it"
        ),
    )
