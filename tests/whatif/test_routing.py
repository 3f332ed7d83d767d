# SPDX-License-Identifier: Apache-2.0
"""Routing by hand, and ``profilemate route`` as a user runs it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.renderers import json as renderer
from analysis.whatif import fast
from analysis.whatif.routing import answer, replicas
from analysis.whatif.routing.cache import Cache
from analysis.whatif.routing.rules import RULES, Bounds, Replicas, Request
from analysis.whatif.workload import read_workload
from tests.analysis.builder import METADATA, SessionBuilder
from tests.analysis.invoke import invoke
from tests.support.scheduler import TRACE

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "routing.md"
KEY = "0123456789abcdef"
SHARED, OWN = 48, 49
"""Tokens that all prompts share in three full blocks, and tokens of a prompt."""


def request(number: int, at_sec: float, **more: Any) -> dict[str, Any]:
    """Half a second for one of the prompts that all begin alike."""
    return {
        "timestamp": 1e3 * at_sec,
        "input_length": OWN,
        "output_length": 2,
        "block_size": 16,
        "hash_ids": [1, 2, 3, 100 + number],
        "request_id": f"team-{number % 2}-{number}",
        "queue_sec": 0.0,
        "finish_sec": at_sec + 0.5,
        "finish_reason": "stop",
        "hit_tokens": SHARED if number >= 4 else 0,
        **more,
    }


@pytest.fixture
def four(tmp_path: Path) -> list[Path]:
    """Four replicas that began a second apart. Their requests came in turns, one a second, from the
    eleventh second of the first one on."""
    built = []
    for number in range(4):
        session = SessionBuilder(tmp_path / f"replica-{number}")
        session.metadata(contents_key=KEY, started_at=f"2026-01-31T12:00:0{number}Z")
        for turn in (number, 4 + number):
            session.requests(request(turn, 10 + turn - number, tenant=turn % 2))
        built.append(session.folder)
    return built


def of(*arguments: object) -> dict[str, Any]:
    done = invoke("route", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_by_hand(four: list[Path]) -> None:
    found = of(*four, "--sticky-by=salt")
    by_policy = {one["policy"]: one for one in found["policies"]}

    def rates(one: dict[str, Any]) -> tuple[int, int | None]:
        return one["hit_tokens"], one["elsewhere_tokens"]

    # The first request of each replica finds nothing; of these, three could have elsewhere.
    turns = (4 * SHARED, 3 * SHARED)
    assert rates(found["measured"]) == (4 * SHARED, None)
    assert rates(found["as_recorded"]) == turns
    assert rates(by_policy["round-robin"]) == turns
    # No two run at once: of equals, the one goes first that had nothing for longest.
    assert rates(by_policy["least-loaded"]) == turns
    # Two salts, on two replicas.
    assert found["keys"] == 2
    assert rates(by_policy["sticky"]) == (6 * SHARED, SHARED)
    assert rates(by_policy["prefix-aware"]) == (7 * SHARED, 0)
    assert rates(by_policy["cache-aware"]) == (7 * SHARED, 0)
    assert rates(found["one_cache"]) == (7 * SHARED, 0)
    assert found["num_blocks"] == [100] * 4
    assert found["replicas"] == [f"replica-{number}" for number in range(4)]

    assert found["as_recorded"]["balance"] == {
        "requests": 1,
        # The replica of the first request computes as much as the others.
        "computed_tokens": 1,
        "running": pytest.approx(1),
    }
    aware = by_policy["cache-aware"]
    # All eight on one of four, for half a second each, in 7.5 s.
    assert aware["balance"]["requests"] == 4
    assert [one["requests"] for one in aware["replicas"]] == [8, 0, 0, 0]
    assert aware["replicas"][0]["running"] == pytest.approx(8 * 0.5 / 7.5)
    assert aware["replicas"][0]["peak"] == 1
    assert aware["replicas"][0]["computed_tokens"] == 8 * (OWN + 2) - 7 * SHARED


def test_a_warm_up_does_not_count_and_fills_the_caches(four: list[Path]) -> None:
    found = of(*four, "--requests-after=4", "--policies=round-robin")
    assert found["warm_up"] == 4
    (turns,) = found["policies"]
    assert (turns["requests"], turns["hit_tokens"]) == (4, 4 * SHARED)
    assert turns["elsewhere_tokens"] == 0


def test_labels_stick(four: list[Path], tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("even = ^team-0\nodd = ^team-1\n")
    found = of(*four, "--sticky-by=label", f"--labels={rules}", "--policies=sticky")
    assert found["keys"] == 2
    (sticky,) = found["policies"]
    assert sorted(one["requests"] for one in sticky["replicas"]) == [0, 0, 4, 4]


def test_conversations_stick_wherever_they_were_served(tmp_path: Path) -> None:
    """Two conversations of three turns, the turns of each on both replicas."""
    built = []
    for number in range(2):
        session = SessionBuilder(tmp_path / f"replica-{number}")
        session.metadata(contents_key=KEY)
        for turn in range(3):
            who = (number + turn) % 2
            ids = [1, *(100 * (who + 1) + at for at in range(2 * turn + 2))]
            session.requests(
                request(turn, 2 * turn + 0.1 * who, input_length=16 * len(ids) + 1)
                | {"hash_ids": [*ids, 900 + 10 * turn + who], "hit_tokens": 0}
            )
        built.append(session.folder)
    found = of(*built, "--policies=sticky,round-robin")
    assert found["keys"] == 2
    sticky, _ = found["policies"]
    assert [one["requests"] for one in sticky["replicas"]] == [3, 3]
    # A turn finds the prompt before it: 3 blocks, then 5.
    assert sticky["hit_tokens"] == 2 * (3 + 5) * 16


def test_engines_of_one_session(tmp_path: Path) -> None:
    session = SessionBuilder(tmp_path / "session")
    engines = [{"pid": rank, "role": "engine", "rank": rank} for rank in range(3)]
    session.metadata(content_ids_shared=True, processes=engines)
    session.requests(*(request(number, number, engine=number % 2) for number in range(8)))
    found = of(session.folder, "--policies=round-robin")
    # The third one got nothing, and is there.
    assert found["replicas"] == [f"session, engine {rank}" for rank in range(3)]
    assert [one["requests"] for one in found["as_recorded"]["replicas"]] == [4, 4, 0]
    assert found["as_recorded"]["hit_tokens"] == 6 * SHARED
    assert found["policies"][0]["hit_tokens"] == 5 * SHARED
    more = of(session.folder, "--policies=round-robin", "--replicas=8", "--blocks=4000")
    assert (more["measured"], more["as_recorded"]) == (None, None)
    assert more["policies"][0]["hit_tokens"] == 0
    assert more["num_blocks"] == [3999] * 8


def test_contents_that_are_not_known_equal_none_of_another_session(tmp_path: Path) -> None:
    built = []
    for number in range(2):
        session = SessionBuilder(tmp_path / f"replica-{number}")
        session.metadata(contents_key=KEY)
        session.requests(request(number, number) | {"hash_ids": [1]})
        built.append(session.folder)
    found = of(*built, "--policies=cache-aware", "--cache-threshold=0")
    assert found["policies"][0]["hit_tokens"] == 16


def test_a_request_that_ends_makes_room_for_the_next(tmp_path: Path) -> None:
    session = SessionBuilder(tmp_path / "session")
    session.metadata(content_ids_shared=True)
    session.requests(*(request(number, 0.5 * number, engine=number // 2) for number in range(4)))
    found = of(session.folder, "--policies=round-robin")
    assert [one["peak"] for one in found["as_recorded"]["replicas"]] == [1, 1]


def test_a_reset_empties_the_cache_of_its_replica(four: list[Path]) -> None:
    session = SessionBuilder(four[0])
    session.metadata(contents_key=KEY, started_at="2026-01-31T12:00:00Z")
    session.rows("kv_cache_allocations.csv", {"timestamp_sec": 12.2, "event": "reset"})
    found = of(*four, "--policies=round-robin")
    # The second request of the first replica finds nothing, although all others have it.
    assert found["as_recorded"]["hit_tokens"] == 3 * SHARED
    assert found["as_recorded"]["elsewhere_tokens"] == 4 * SHARED


def test_the_recorded_routing_is_what_the_fast_engine_models() -> None:
    """Three caches of the step-by-step kind find what the one pass over all sizes finds."""
    trace = read_workload(TRACE, tokens_per_id=512).take(np.arange(1500))
    ended = trace.arrival_sec + 0.02 * trace.output_tokens
    load = replace(trace, engine=np.arange(len(trace)) * 7 % 3, finish_sec=ended)
    size = 1_000
    expected = fast.of_pools(load)(size)
    recorded = replicas.Recorded(
        load, ("a", "b", "c"), (size,) * 3, np.full(len(load), replicas.NO_LABEL)
    )
    found = answer.routed(recorded, policies=[]).as_recorded
    assert found is not None
    assert expected.evictions
    assert (found.hit_tokens, found.evictions) == (expected.hit_tokens, expected.evictions)
    shared = fast.of_pools(replace(load, engine=np.zeros(len(load), np.int64)))(3 * size)
    assert answer.routed(recorded, policies=[]).one_cache.hit_tokens == shared.hit_tokens


def asking(prompt: Sequence[int], key: int = 0) -> Request:
    return Request(prompt, len(prompt), 1 / max(1, len(prompt)), key)


def with_loads(*loads: int) -> Replicas:
    made = Replicas([Cache(100) for _ in loads])
    made.load[:] = loads
    return made


def test_load_decides_where_replicas_are_far_apart() -> None:
    found = with_loads(7, 4, 5)
    found.caches[0].hold([1, 2])

    def chosen(bounds: Bounds, prompt: Sequence[int] = (1, 2)) -> int:
        return RULES["cache-aware"](bounds)(asking(prompt), found)

    assert chosen(Bounds(0.5, 3, 1.5)) == 0  # Three apart is not more than three.
    assert chosen(Bounds(0.5, 2, 1.5)) == 1
    assert chosen(Bounds(0.5, 2, 1.75)) == 0  # Nor is 7 more than 1.75 times 4.
    assert chosen(Bounds(0.5, 64, 1.5), (1, 2, 3, 4)) == 1  # Half is not more than half.
    assert chosen(Bounds(0.49, 64, 1.5), (1, 2, 3, 4)) == 0
    assert chosen(Bounds(0, 64, 1.5), (3,)) == 1  # No match at all.


def test_of_equal_matches_the_least_loaded_is_taken() -> None:
    found = with_loads(3, 2, 1)
    for cache in found.caches[:2]:
        cache.hold([1, 2])
    assert RULES["cache-aware"](Bounds())(asking([1, 2]), found) == 1


def test_what_was_sent_is_known_before_it_is_cached() -> None:
    found = with_loads(0, 0)
    rule, cached = RULES["prefix-aware"](Bounds()), RULES["cache-aware"](Bounds())
    first = rule(asking([1, 2]), found)
    found.send(first)
    assert rule(asking([1, 2, 3]), found) == first
    assert cached(asking([1, 2, 3]), found) != first


def test_what_runs_is_not_evicted() -> None:
    cache = Cache(3)
    cache.hold([1, 2])
    cache.hold([3])
    cache.release([3])
    cache.hold([4, 5])
    assert [cache.depth([block]) for block in (1, 2, 3, 4, 5)] == [1, 1, 0, 1, 1]
    cache.release([1, 2])
    # The last block of what ended goes first.
    assert (cache.depth([1, 2]), cache.evictions) == (1, 2)


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"contents_key": None}, [], "replica-3 has contents that are its own alone"),
        (
            {"contents_key": None, "contents_apart_because": "no key was given"},
            [],
            "replica-3 has contents that are its own alone (no key was given), so no other",
        ),
        ({"contents_key": "f" * 16}, [], "have contents that do not compare: another key, model"),
        ({"started_at": None}, [], "does not say when it began (started_at)"),
        ({}, ["--policies=fastest"], "--policies: 'fastest' is none of round-robin, least-loaded"),
        ({}, ["--sticky-by=user"], "--sticky-by: 'user' is none of conversation, salt, label"),
        ({}, ["--sticky-by=label"], "--sticky-by label: no labels are known; give --labels FILE"),
        ({}, ["--replicas=1"], "--replicas is 1; give a number from 2 to 4,096"),
        ({}, ["--blocks=2,3"], "--blocks: every replica has the same size; give one"),
        ({}, ["--cache-threshold=2"], "--cache-threshold is 2; give a share from 0 to 1"),
        ({}, ["--balance-rel-threshold=nan"], "--balance-rel-threshold is nan; give a number"),
        ({}, ["--step-ms=0"], "--step-ms is 0; give more than 0"),
        ({}, ["--time-unit=s"], "--time-unit: a session says it itself"),
        ({}, ["--after=a mark"], "--after: a mark is one session's"),
        ({"cache": {}}, ["--policies=sticky"], "replica-3 does not say how large its pool is"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    four: list[Path], changes: dict[str, Any], options: list[str], said: str
) -> None:
    content = {**METADATA, "contents_key": KEY, **changes}
    (four[3] / "metadata.json").write_text(json.dumps(content))
    done = invoke("route", *four, *options)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert said in line


def test_the_same_replica_twice(four: list[Path]) -> None:
    done = invoke("route", four[0], four[0])
    assert done.returncode == 2
    assert "is there twice; give the session of each replica once" in done.stderr


def test_engines_whose_contents_do_not_compare(tmp_path: Path) -> None:
    session = SessionBuilder(tmp_path / "session")
    session.requests(*(request(number, number, engine=number % 2) for number in range(8)))
    done = invoke("route", session.folder)
    assert done.returncode == 2
    assert "record it with PYTHONHASHSEED=0 in vLLM's environment" in done.stderr
    alone = SessionBuilder(tmp_path / "alone")
    alone.requests(request(0, 0))
    done = invoke("route", alone.folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has one replica, and nothing to route" in done.stderr


def test_a_trace(tmp_path: Path) -> None:
    done = invoke("route", TRACE)
    assert "is a trace; say --replicas and --blocks" in done.stderr
    found = of(TRACE, "--replicas=4", "--blocks=8000", "--step-ms=25")
    assert (found["measured"], found["as_recorded"], found["step_sec"]) == (None, None, 0.025)
    rates = {one["policy"]: one["hit_rate"] for one in found["policies"]}
    assert rates["round-robin"] < rates["sticky"] < rates["cache-aware"]
    assert rates["cache-aware"] <= found["one_cache"]["hit_rate"]


def test_text(four: list[Path]) -> None:
    done = invoke("route", *four, "--sticky-by=salt")
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    words = " ".join(done.stdout.split())
    assert "8 requests on 4 replicas with 100 usable blocks of 16 tokens each." in words
    assert "as it ran measured 48.98 % n/a n/a" in words
    assert "as recorded modelled 48.98 % 36.73 % 0" in words
    assert "cache-aware 4.00x" in words
    assert "The model of the recorded routing has the measured hit rate." in words


def test_replicas_that_did_not_run_together_get_a_note(four: list[Path]) -> None:
    SessionBuilder(four[3]).metadata(contents_key=KEY, started_at="2026-01-31T13:00:00Z")
    found = of(*four, "--policies=round-robin")
    assert any("did not share a load" in note for note in found["notes"])


def test_every_key_is_documented(four: list[Path]) -> None:
    found = of(*four)
    documented = set(re.findall(r"`([a-z_]+)`", DOCS.read_text()))

    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    assert keys(found) <= documented
    assert renderer.KINDS[answer.Routing] == "routing"
