# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from analysis import open_session
from analysis.prefix.prefix_cache import (
    ADMITTED,
    EVERY_LOOKUP,
    NOT_RESUMED,
    Lookups,
    PrefixCache,
    measure,
    release,
)
from tests.analysis.builder import METADATA, SessionBuilder


def cache_of(session: SessionBuilder, vllm: str | None = "0.32.0") -> PrefixCache:
    session.metadata(versions={**METADATA["versions"], "vllm": vllm})
    return measure(open_session(session.folder))


def eight_alike(session: SessionBuilder) -> None:
    """8 identical prompts of 1,024 tokens: the last token is always computed, so a hit of 63
    blocks of 16."""
    session.lookups(
        *(
            {"request_id": str(number), "query_tokens": 1024, "hit_tokens": 1008 * (number > 0)}
            for number in range(8)
        )
    )


def test_eight_identical_prompts(session: SessionBuilder) -> None:
    eight_alike(session)
    cache = cache_of(session)
    assert (cache.true.requests_hit, cache.true.requests) == (7, 8)
    assert cache.true.request_rate == 0.875
    assert (cache.true.hit_tokens, cache.true.query_tokens) == (7056, 8192)
    assert f"{cache.true.token_rate:.4%}" == "86.1328%"
    assert cache.vllm.token_rate == cache.true.token_rate


def waiting_and_preempted(session: SessionBuilder) -> None:
    """Request a hits 80 of 100 and is preempted: then it finds 90 of its own 110. Request b
    waits: 5 lookups in all that find nothing, then one that finds 60 of 200 and admits it.
    Request c, looked up 1,000 times, never fits. Request d must not read the cache."""
    session.lookups(
        {"request_id": "a", "query_tokens": 100, "hit_tokens": 80},
        {"request_id": "b", "query_tokens": 200, "hit_tokens": 0, "admitted": 0},
        {
            "request_id": "b",
            "query_tokens": 200,
            "hit_tokens": 0,
            "kind": "retry",
            "admitted": 0,
            "lookups": 4,
        },
        {"request_id": "a", "query_tokens": 110, "hit_tokens": 90, "kind": "resumed"},
        {"request_id": "b", "query_tokens": 200, "hit_tokens": 60, "kind": "retry"},
        {"request_id": "c", "query_tokens": 50, "hit_tokens": 10, "admitted": 0},
        {
            "request_id": "c",
            "query_tokens": 50,
            "hit_tokens": 10,
            "kind": "retry",
            "admitted": 0,
            "lookups": 999,
        },
        {"request_id": "d", "query_tokens": 70, "hit_tokens": 0, "kind": "skipped"},
    )


@pytest.mark.parametrize("vllm", ["0.8.5", "0.11.0", "0.26.0", "0.32.0", None])
def test_the_true_rate_counts_each_admitted_request_once(
    session: SessionBuilder, vllm: str | None
) -> None:
    waiting_and_preempted(session)
    cache = cache_of(session, vllm)
    assert (cache.true.requests, cache.true.requests_hit) == (2, 2)
    assert (cache.true.query_tokens, cache.true.hit_tokens) == (300, 140)
    assert cache.repeated == Lookups(1005, 5 * 200 + 1000 * 50, 1000 * 10)
    assert cache.resumed == Lookups(1, 110, 90)
    assert cache.skipped == Lookups(1, 70, 0)


@pytest.mark.parametrize(
    ("vllm", "rule", "counted"),
    [
        # What each adds to the true rate's 2 lookups, 300 tokens, 140 found.
        ("0.8.5", EVERY_LOOKUP, Lookups(2 + 1005 + 1, 300 + 51_000 + 110, 140 + 10_000 + 90)),
        ("0.11.0", EVERY_LOOKUP, Lookups(1008, 51_410, 10_230)),
        ("0.11.1", NOT_RESUMED, Lookups(2 + 1005, 300 + 51_000, 140 + 10_000)),
        ("0.26.0", NOT_RESUMED, Lookups(1007, 51_300, 10_140)),
        ("0.27.0", ADMITTED, Lookups(2, 300, 140)),
        ("0.32.0+cpu", ADMITTED, Lookups(2, 300, 140)),
    ],
)
def test_vllm_counts_by_the_rule_of_its_release(
    session: SessionBuilder, vllm: str, rule: str, counted: Lookups
) -> None:
    waiting_and_preempted(session)
    rate = cache_of(session, vllm).vllm
    assert rate.rule == rule
    assert rate.counted == counted
    assert rate.token_rate == counted.hit_tokens / counted.query_tokens
    assert rate.repeated is not None
    assert rate.resumed is not None
    assert Lookups(2, 300, 140) + rate.repeated + rate.resumed == counted


@pytest.mark.parametrize("vllm", [None, "dev", "0.1.dev1+g12ab34"])
def test_an_unknown_release_has_no_rate(session: SessionBuilder, vllm: str | None) -> None:
    eight_alike(session)
    rate = cache_of(session, vllm).vllm
    assert (rate.rule, rate.counted, rate.token_rate) == (None, None, None)


def test_an_admitted_retry_replaces_the_admission_before_it(session: SessionBuilder) -> None:
    # The blocks that a's first lookup led to were never filled: it was admitted again. The
    # other two are different requests of a client that uses an id again.
    session.lookups(
        {"request_id": "a", "query_tokens": 100, "hit_tokens": 16},
        {"request_id": "again", "query_tokens": 10, "hit_tokens": 0},
        {"request_id": "a", "query_tokens": 100, "hit_tokens": 48, "kind": "retry"},
        {"request_id": "again", "query_tokens": 10, "hit_tokens": 8},
    )
    true = cache_of(session).true
    assert (true.requests, true.requests_hit) == (3, 2)
    assert (true.query_tokens, true.hit_tokens) == (120, 56)


def test_external_hits_are_kept_apart(session: SessionBuilder) -> None:
    session.lookups(
        {"request_id": "a", "query_tokens": 100, "hit_tokens": 0, "external_hit_tokens": 64},
        {"request_id": "b", "query_tokens": 100, "hit_tokens": 32, "external_hit_tokens": 0},
    )
    true = cache_of(session).true
    assert (true.hit_tokens, true.requests_hit) == (32, 1)
    assert (true.external_hit_tokens, true.external_requests_hit) == (64, 1)


def test_engines_are_summed_up(session: SessionBuilder) -> None:
    # The same id on two engines is two requests.
    session.lookups(
        {"request_id": "0", "query_tokens": 100, "hit_tokens": 50, "engine": 0},
        {"request_id": "0", "query_tokens": 100, "hit_tokens": 0, "engine": 1, "kind": "retry"},
    )
    assert cache_of(session).true.requests == 2


def test_no_lookup_has_no_rate(session: SessionBuilder) -> None:
    cache = cache_of(session)
    assert cache.true.token_rate is cache.true.request_rate is cache.vllm.token_rate is None


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.11.1rc2.dev5+gabc", (0, 11, 1)),
        ("0.27", (0, 27, 0)),
        ("1.0.0", (1, 0, 0)),
        ("0.1.dev1", None),
        ("", None),
    ],
)
def test_releases_are_read_from_versions(
    version: str, expected: tuple[int, int, int] | None
) -> None:
    assert release(version) == expected
