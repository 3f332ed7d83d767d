# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a session is found, ranked, and on the first screen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from analysis import Summary, open_session, series, summarize
from analysis.judgement.findings import fine
from analysis.renderers import json as json_renderer
from analysis.renderers.html import page as html
from analysis.renderers.text import screen
from analysis.renderers.text import summary as whole
from analysis.summary import Finding
from analysis.wording import sections
from analysis.wording.advice import none
from tests.analysis.builder import SessionBuilder
from tests.analysis.graphs import mixed
from tests.analysis.stories import swept
from tests.analysis.test_measures import leaking, swept_on_purpose, victim_of_another, waiting
from tests.analysis.test_text import busy

FINE = "Nothing in this session asks for another setting."


def summary_of(session: SessionBuilder) -> Summary:
    return summarize(open_session(session.folder))


def by_section(summary: Summary) -> dict[str, Finding]:
    return {finding.section: finding for finding in summary.findings}


def quiet(session: SessionBuilder) -> None:
    """One request that finds nothing and lacks nothing."""
    session.metadata(cost={"hook_sec": 0.01})
    session.usage((1, 50), (3, 0))
    session.rows("scheduler_steps.csv", {"timestamp_sec": 1, "scheduled_tokens": 100})
    session.lookups({"request_id": "r", "query_tokens": 100, "hit_tokens": 0, "timestamp_sec": 1})
    session.requests({"request_id": "r", "timestamp": 1000, "finish_sec": 3, "hash_ids": []})


def test_a_leak_is_found(session: SessionBuilder) -> None:
    """Two of 100 blocks; nobody holds them."""
    leaking(session)
    found = summary_of(session)
    leak = by_section(found)[sections.HOLDERS]
    assert leak.share == 2 / 100
    assert leak.says.startswith("2 blocks leaked")
    assert "leaks" not in fine(found)
    for rendered in (screen.render(found), whole.render(found)):
        top = "\n".join(rendered.splitlines()[:20])
        assert "2 blocks" in top
        assert f"[{sections.HOLDERS}]" in top
        assert FINE not in rendered


def test_the_report_and_json_have_the_findings(session: SessionBuilder) -> None:
    leaking(session)
    found = summary_of(session)
    page = html.render(found, series.measure(open_session(session.folder), found))
    story = page[: page.index("<h2>Advice</h2>")]
    assert "2 blocks leaked" in story
    assert "[Who holds blocks]" in story
    assert FINE not in page
    (leak,) = (
        each
        for each in json.loads(json_renderer.render(found))["findings"]
        if "leaked" in each["says"]
    )
    assert (leak["section"], leak["share"], leak["tokens"]) == ("Who holds blocks", 0.02, None)


def test_nothing_is_found_where_nothing_is(session: SessionBuilder) -> None:
    quiet(session)
    found = summary_of(session)
    assert (found.findings, found.advice) == ((), ())
    rendered = screen.render(found)
    assert FINE in rendered
    assert "Fine: " in rendered


@pytest.mark.parametrize(
    ("story", "section", "cost"),
    [
        # 32 of 300 prompt tokens.
        (swept, sections.MISSES, {"tokens": 32, "share": 32 / 300}),
        (swept_on_purpose("reset"), sections.MISSES, {"tokens": 32, "share": 32 / 300}),
        (swept_on_purpose("explicit"), sections.MISSES, {"tokens": 32, "share": 32 / 300}),
        (victim_of_another, sections.PREEMPTIONS, {"tokens": 47, "share": 47 / 235}),
        # Two requests for 1 s and one for 2 s.
        (waiting, sections.WAITING, {"seconds": 4.0}),
        # Two of 20 executions.
        (mixed, sections.LEDGER, {}),
        (mixed, sections.GRAPHS, {"tokens": 16, "share": 16 / 104}),
    ],
)
def test_what_costs_something_is_found(
    session: SessionBuilder,
    story: Callable[[SessionBuilder], None],
    section: str,
    cost: dict[str, float],
) -> None:
    story(session)
    finding = by_section(summary_of(session))[section]
    assert {name: getattr(finding, name) for name in cost} == pytest.approx(cost)


def test_resets_are_told_from_room(session: SessionBuilder) -> None:
    swept_on_purpose("reset")(session)
    found = summary_of(session)
    (finding,) = (each for each in found.findings if each.tokens == 32)
    assert "dropped by resets" in finding.says
    assert "evictions" in fine(found)
    assert "resets" not in fine(found)


def test_a_request_that_can_never_run_is_found(session: SessionBuilder) -> None:
    session.lookups({"request_id": "huge", "query_tokens": 1601, "hit_tokens": 0, "admitted": 0})
    finding = by_section(summary_of(session))[sections.REQUESTS]
    assert finding.says.startswith("1 request can never run")


def waits_behind(session: SessionBuilder, held: int, tokens: int) -> None:
    """As ``waiting``, with so many of 100 blocks held and so long a prompt in front."""
    waiting(session)
    for table in ("kv_cache_usage.csv", "prefix_cache_lookups.csv"):
        (session.folder / table).unlink()
    session.usage((0, held))
    refused = {"request_id": "head", "query_tokens": tokens, "hit_tokens": 0, "admitted": 0}
    session.lookups({"timestamp_sec": 1.99995, **refused})


def test_the_first_in_line_blocks_the_others(session: SessionBuilder) -> None:
    """A prompt of 1,100 tokens needs 69 blocks and 40 are free: 2 s of waiting, while 40 % of the
    pool is not held."""
    waits_behind(session, 60, 1_100)
    (found,) = (each for each in summary_of(session).findings if "head-of-line" in each.says)
    assert found.seconds == 2
    assert "40 % of the pool was not held" in found.says


def test_a_full_pool_is_no_head_of_line_blocking(session: SessionBuilder) -> None:
    """A prompt of 500 tokens needs 32 blocks, and 10 are free: nothing else would fit, either."""
    waits_behind(session, 90, 500)
    found = summary_of(session)
    assert any(each.section == sections.WAITING for each in found.findings)
    assert not any("head-of-line" in each.says for each in found.findings)


def test_the_costliest_comes_first(session: SessionBuilder) -> None:
    swept(session)
    mixed(session)
    shares = [each.share or 0.0 for each in summary_of(session).findings]
    assert len(shares) > 1
    assert shares == sorted(shares, reverse=True)


def test_a_small_cost_is_none(session: SessionBuilder) -> None:
    """Less than a hundredth of the prompts' tokens."""
    swept(session)
    session.lookups(
        {"request_id": "long", "query_tokens": 10_000, "hit_tokens": 0, "timestamp_sec": 90}
    )
    assert not any(each.tokens == 32 for each in summary_of(session).findings)


def test_no_advice_is_not_all_right() -> None:
    finding = Finding("Requests", "something", None)
    assert none((), ()) == FINE
    assert none((finding,), ()) != FINE
    assert none((), ("7 events were dropped",)) != FINE


@pytest.mark.parametrize("story", [quiet, swept, leaking, waiting, mixed, victim_of_another, busy])
def test_it_is_one_screen(session: SessionBuilder, story: Callable[[SessionBuilder], None]) -> None:
    story(session)
    found = summary_of(session)
    lines = screen.render(found).splitlines()
    assert len(lines) <= 39
    assert [line for line in lines[2:] if len(line) > 80] == []
    assert "--full" in lines[-1]
    assert sum(line.lstrip().startswith("Fine: ") for line in lines) <= 1
    shown = sum(line.startswith("  - ") for line in lines[:20])
    assert shown == sum(line.startswith("  - ") for line in lines)
    assert shown == len(found.findings) or any("more: --full" in line for line in lines[:20])


def test_it_stays_one_screen_whatever_is_found(session: SessionBuilder) -> None:
    swept(session)
    found = summary_of(session)
    many = tuple(Finding("Requests", f"{number} " + "word " * 40, None) for number in range(30))
    warnings = tuple(f"warning {number} " + "word " * 30 for number in range(30))
    advice = tuple(replace(found.advice[0], says="Change it. " * 20) for _ in range(30))
    lines = screen.render(
        replace(found, findings=many, warnings=warnings, advice=advice)
    ).splitlines()
    assert len(lines) <= 39
    assert sum("more: --full" in line for line in lines) == 3
