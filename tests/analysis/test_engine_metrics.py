# SPDX-License-Identifier: Apache-2.0
"""Pages of vLLM's metrics beside sessions whose every difference is known by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis import SessionError, open_session
from analysis.engine_metrics import Reconciliation, Row, parse, reconcile
from analysis.renderers.text import engine_metrics as text
from tests.analysis.builder import METADATA, SessionBuilder
from tests.analysis.test_json import keys

ROOT = Path(__file__).parents[2]

DOCUMENTATION = Path(__file__).parent.parent.parent / "docs" / "engine-metrics.md"
BEGAN = 1769860800.0
"""2026-01-31T12:00:00Z, when the builder's session began; it lasts 10 s."""

HEAD = """\
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
"""


def page(**counters: float) -> str:
    """A page as vLLM writes it; ``__`` in a name begins the value of its label."""
    lines = [HEAD.rstrip()]
    for name, value in counters.items():
        metric, _, label = name.partition("__")
        labels = 'engine="0",model_name="m"'
        if label:
            labels += f',finished_reason="{label}"'
        if metric == "cache_config_info":
            labels += f',num_gpu_blocks="{value:g}"'
        lines.append(f"vllm:{metric}{{{labels}}} {value}")
    return "\n".join(lines) + "\n"


def beside(builder: SessionBuilder, scraped: float | None = None, **counters: float) -> Found:
    at = None if scraped is None else BEGAN + scraped
    return Found(reconcile(open_session(builder.folder), parse(page(**counters), "page", at)))


class Found:
    def __init__(self, found: Reconciliation) -> None:
        self.all = found
        self.rows: Mapping[str, Row] = {row.metric.removeprefix("vllm:"): row for row in found.rows}

    def parts(self, name: str) -> list[tuple[float, float]]:
        return [(part.least, part.most) for part in self.rows[name].parts]


@pytest.fixture
def session(tmp_path: Path) -> SessionBuilder:
    return SessionBuilder(tmp_path / "session")


def lookups(session: SessionBuilder) -> None:
    """Two requests: one that waited through 3 more lookups, and one that was preempted."""
    session.lookups(
        {"timestamp_sec": 1, "request_id": "a", "query_tokens": 100, "hit_tokens": 0},
        {
            "timestamp_sec": 2,
            "request_id": "b",
            "query_tokens": 50,
            "hit_tokens": 32,
            "admitted": 0,
            "lookups": 3,
        },
        {
            "timestamp_sec": 3,
            "request_id": "b",
            "query_tokens": 50,
            "hit_tokens": 32,
            "kind": "retry",
        },
        {
            "timestamp_sec": 4,
            "request_id": "a",
            "query_tokens": 120,
            "hit_tokens": 96,
            "kind": "resumed",
        },
    )


@pytest.mark.parametrize(
    ("release", "queries", "hits"),
    [
        ("0.32.0", 150, 32),
        # The three lookups of b that came to nothing.
        ("0.26.0", 150 + 3 * 50, 32 + 3 * 32),
        # And that of a after its preemption.
        ("0.11.0", 150 + 3 * 50 + 120, 32 + 3 * 32 + 96),
    ],
)
def test_each_release_counts_lookups_by_its_rule(
    session: SessionBuilder, release: str, queries: int, hits: int
) -> None:
    lookups(session)
    session.metadata(versions={**METADATA["versions"], "vllm": release})
    found = beside(session, prefix_cache_queries_total=queries, prefix_cache_hits_total=hits)
    for name, value, session_has in (("queries", queries, 150), ("hits", hits, 32)):
        row = found.rows[f"prefix_cache_{name}"]
        assert (row.vllm, row.session, row.unexplained) == (value, session_has, 0)
        assert row.verdict == ("equal" if release == "0.32.0" else "explained")
        assert sum(part.most for part in row.parts) == value - session_has
    assert found.all.agrees
    # What this release does not count is no explanation.
    found = beside(session, prefix_cache_queries_total=queries + 7, prefix_cache_hits_total=hits)
    assert found.rows["prefix_cache_queries"].unexplained == 7
    assert found.rows["prefix_cache_queries"].verdict == "unexplained"
    assert not found.all.agrees


def test_later_lookups_explain_a_page_with_less(session: SessionBuilder) -> None:
    session.lookups(
        *(
            {"timestamp_sec": at, "request_id": f"r{at}", "query_tokens": 100, "hit_tokens": 16}
            for at in (1, 4.5, 6, 8)
        )
    )
    # Those of 6 and 8 s came after it; that of 4.5 s was in its last second.
    found = beside(session, 5.0, prefix_cache_queries_total=200)
    row = found.rows["prefix_cache_queries"]
    assert (row.session, row.difference, row.unexplained) == (400, -200, 0)
    assert found.parts("prefix_cache_queries") == [(-200, -200)]
    found = beside(session, 5.0, prefix_cache_queries_total=100)
    assert found.parts("prefix_cache_queries") == [(-200, -200), (-100, 0)]
    assert found.all.agrees
    assert (
        beside(session, 5.0, prefix_cache_queries_total=90).rows["prefix_cache_queries"].unexplained
        == -10
    )
    assert (
        beside(session, 5.0, prefix_cache_queries_total=300)
        .rows["prefix_cache_queries"]
        .unexplained
        == 100
    )
    # Taken after the end, or at a time not known: the page has to have all lookups.
    for scraped in (11.0, None):
        found = beside(session, scraped, prefix_cache_queries_total=200)
        assert found.rows["prefix_cache_queries"].unexplained == -200


def requests(session: SessionBuilder) -> None:
    rows: tuple[dict[str, Any], ...] = (
        {"input_length": 100, "output_length": 10, "first_token_sec": 1, "finish_sec": 2},
        {
            "input_length": 200,
            "output_length": 20,
            "first_token_sec": 3,
            "finish_sec": 8,
            "finish_reason": "stop",
        },
        {"input_length": 400, "output_length": 40, "first_token_sec": 7, "finish_sec": 9},
        {
            "input_length": 800,
            "output_length": 0,
            "first_token_sec": None,
            "finish_sec": 3,
            "finish_reason": "abort",
            "preemptions": 2,
        },
        {
            "input_length": 1600,
            "output_length": 5,
            "first_token_sec": 2,
            "finish_sec": 3,
            "finish_reason": "abort",
        },
    )
    session.requests(
        *(
            {"request_id": f"r{number}", "finish_reason": "length", "preemptions": 0, **row}
            for number, row in enumerate(rows)
        )
    )


def test_tokens_at_the_end(session: SessionBuilder) -> None:
    requests(session)
    found = beside(session, prompt_tokens_total=2300, generation_tokens_total=73)
    # vLLM counts no prompt whose request never had a token; of an aborted one's 5 it saw 3.
    assert found.rows["prompt_tokens"].session == 3100
    assert found.parts("prompt_tokens") == [(-800, -800)]
    assert found.rows["generation_tokens"].session == 75
    # And three steps of each of two that the engine may have ended as their clients left.
    assert found.parts("generation_tokens") == [(-5, 0), (-6, 0)]
    assert found.all.agrees
    assert beside(session, generation_tokens_total=63).rows["generation_tokens"].unexplained == -1


def test_tokens_in_the_middle(session: SessionBuilder) -> None:
    requests(session)
    # At 5 s: the first and the aborted request had ended, the second had 1 to 20 tokens.
    found = beside(session, 5.0, prompt_tokens_total=1900, generation_tokens_total=27)
    assert found.parts("prompt_tokens") == [(-800, -800), (-400, -400)]
    assert found.rows["prompt_tokens"].verdict == "explained"
    assert found.parts("generation_tokens") == [(-40, -40), (-20, 0), (-5, 0), (-6, 0)]
    assert found.rows["generation_tokens"].verdict == "explained"


def test_endings(session: SessionBuilder) -> None:
    requests(session)
    found = beside(
        session,
        request_success_total__length=2,
        # One of the two that the engine saw aborted had met a stop string.
        request_success_total__stop=2,
        request_success_total__abort=0,
        request_success_total__error=0,
    )
    assert found.rows['request_success{finished_reason="length"}'].verdict == "equal"
    stop = found.rows['request_success{finished_reason="stop"}']
    assert (stop.session, stop.difference, stop.verdict) == (1, 1, "explained")
    abort = found.rows['request_success{finished_reason="abort"}']
    assert (abort.session, abort.difference, abort.verdict) == (2, -2, "explained")
    assert 'request_success{finished_reason="error"}' not in found.rows
    found = beside(session, request_success_total__length=3)
    assert not found.all.agrees


def leaving(session: SessionBuilder, aborted: int) -> None:
    """114 requests that the engine ended, and so many whose clients left after 150 ms. Of the 114,
    the engine ended ten after 100 ms, with one token, and the others after 3 s."""
    rows = [
        {"finish_sec": 3.0 + number / 1000 if number >= 10 else 0.1 + number / 1000}
        | {"output_length": 20 if number >= 10 else 1}
        for number in range(114)
    ]
    rows += [{"finish_sec": 0.15, "finish_reason": "abort", "output_length": 2}] * aborted
    for number, row in enumerate(rows):
        session.requests(
            {
                "request_id": f"r{number}",
                "timestamp": 0,
                "input_length": 10 + number,
                "first_token_sec": 0.01,
                "finish_reason": "length",
                "preemptions": 0,
                **row,
            }
        )


def test_a_client_that_leaves_as_the_engine_ends_its_request(session: SessionBuilder) -> None:
    """vLLM drops what comes for it then, and counts neither the end nor the last tokens."""
    leaving(session, aborted=26)
    found = beside(session, request_success_total__length=113)
    row = found.rows['request_success{finished_reason="length"}']
    assert (row.verdict, row.parts[0].least, row.parts[0].most) == ("explained", -26, 0)
    assert "that the engine ended as their client left" in row.parts[0].says
    # No more than clients left.
    assert not beside(session, request_success_total__length=87).all.agrees
    # Two tokens of each aborted one, and three steps' of as many others.
    tokens = 104 * 20 + 10 + 52
    found = beside(session, generation_tokens_total=tokens - 52 - 3 * 26)
    assert found.rows["generation_tokens"].verdict == "explained"
    found = beside(session, generation_tokens_total=tokens - 52 - 3 * 26 - 1)
    assert found.rows["generation_tokens"].unexplained == -1
    # The prompts of those that had few tokens, ten at most.
    prompts = sum(range(10, 150))
    found = beside(session, prompt_tokens_total=prompts - sum(range(10, 20)))
    assert found.rows["prompt_tokens"].verdict == "explained"
    found = beside(session, prompt_tokens_total=prompts - sum(range(10, 20)) - 1)
    assert found.rows["prompt_tokens"].unexplained == -1


def test_of_short_requests_no_more_prompts_than_clients_that_left(session: SessionBuilder) -> None:
    leaving(session, aborted=3)
    prompts = sum(range(10, 127))
    for missing, unexplained in ((19 + 18 + 17, 0), (19 + 18 + 17 + 1, -1)):
        found = beside(session, prompt_tokens_total=prompts - missing)
        assert found.rows["prompt_tokens"].unexplained == unexplained


def test_where_no_client_leaves_each_end_counts(session: SessionBuilder) -> None:
    leaving(session, aborted=0)
    assert not beside(session, request_success_total__length=113).all.agrees


def test_who_ends_long_before_the_first_client_leaves_had_not_left(session: SessionBuilder) -> None:
    for number, end in enumerate((3.9, 4.1, 9, 5)):
        row = {"request_id": f"r{number}", "timestamp": 0, "finish_sec": end}
        session.requests(row | {"finish_reason": "abort" if number == 3 else "length"})
    for end in (6, 7):
        session.requests({"timestamp": 0, "finish_sec": end, "finish_reason": "abort"})
    for counted, agrees in ((1, True), (0, False)):
        assert beside(session, request_success_total__length=counted).all.agrees == agrees


def test_small_shares_are_told_apart(session: SessionBuilder) -> None:
    """One block of a hundred thousand is not nothing."""
    session.usage((1, 0))
    shown = text.render(beside(session, kv_cache_usage_perc=9.75e-06).all)
    words = " ".join(shown.split())
    assert "kv_cache_usage_perc 0.000975 % 0 % unexplained" in words
    assert "+0.000975 points unexplained" in words
    assert "0.00 %" not in shown
    session.usage((2, 50))
    words = " ".join(text.render(beside(session, kv_cache_usage_perc=0.5000004).all).split())
    assert "kv_cache_usage_perc 50 % 50 %" not in words


def test_preemptions(session: SessionBuilder) -> None:
    requests(session)
    session.rows(
        "scheduler_steps.csv",
        *(
            {"timestamp_sec": at, "step": step, "preempted_reqs": preempted}
            for step, (at, preempted) in enumerate(
                [(1, 1), (3, 3), (4.2, 0), (4.3, 0), (4.4, 0), (6, 6)], 1
            )
        ),
    )
    # Two of the ten were of a request that was aborted before its next token.
    assert beside(session, num_preemptions_total=8).rows["num_preemptions"].verdict == "explained"
    assert beside(session, num_preemptions_total=7).rows["num_preemptions"].unexplained == -1
    found = beside(session, 5.5, num_preemptions_total=4)
    assert found.parts("num_preemptions") == [(-6, -6)]
    # The results of the last three steps may not be back, however long these take.
    found = beside(session, 4.35, num_preemptions_total=1)
    assert found.parts("num_preemptions") == [(-6, -6), (-3, 0), (-2, 0)]
    assert found.all.agrees


def test_usage_is_that_of_the_pages_moment(session: SessionBuilder) -> None:
    session.usage((1, 40), (4.5, 60), (4.8, 30), (6, 80))
    assert beside(session, 4.9, kv_cache_usage_perc=0.3).rows["kv_cache_usage_perc"].verdict == (
        "equal"
    )
    found = beside(session, 4.9, kv_cache_usage_perc=0.6)
    assert found.rows["kv_cache_usage_perc"].verdict == "explained"
    assert found.rows["kv_cache_usage_perc"].session == pytest.approx(0.3)
    found = beside(session, 4.9, kv_cache_usage_perc=0.8)
    assert found.rows["kv_cache_usage_perc"].unexplained == pytest.approx(0.2)
    # At the end all of it is let go; here it is not, and nothing explains a 0.
    assert not beside(session, kv_cache_usage_perc=0.0).all.agrees


def blocks(session: SessionBuilder, *options: str) -> None:
    """160 allocations from a pool of 100 blocks, at least 90 of which were used; 20 evictions."""
    session.metadata(argv=["vllm", "serve", "m", "--kv-cache-metrics", *options])
    session.rows(
        "kv_cache_allocations.csv",
        {"event": "allocate", "num_blocks": 160, "request_id": "a"},
        {"event": "free", "num_blocks": 160, "request_id": "a"},
    )
    session.usage((1, 45), (2, 0))
    session.evictions(*({"lifetime_sec": 3, "idle_sec": 2, "block_id": n} for n in range(20)))


def test_blocks_without_content_are_no_evictions(session: SessionBuilder) -> None:
    blocks(session, "--kv-cache-metrics-sample=1.0")
    counts = {"kv_block_lifetime_seconds_sum": 30.0}
    # 100 fresh blocks at most, 90 at least: 60 to 70 of 160 were used before.
    for count, left in ((60, 0), (65, 0), (70, 0), (71, 1), (59, -1)):
        found = beside(session, kv_block_lifetime_seconds_count=count, **counts)
        row = found.rows["kv_block_lifetime_seconds_count"]
        assert (row.session, row.unexplained) == (20, left), count
        assert found.parts("kv_block_lifetime_seconds_count") == [(40, 50)]
    assert not any("kv_block" in name for name in found.all.missing)
    assert all(len(line) <= 80 for line in text.render(found.all).splitlines())
    mean = found.rows["kv_block_lifetime_seconds, mean"]
    assert (mean.verdict, mean.session) == ("not comparable", 3)
    assert mean.vllm == pytest.approx(30 / 59)


@pytest.mark.parametrize("options", [(), ("--kv-cache-metrics-sample", "0.01")])
def test_a_sample_has_its_error(session: SessionBuilder, options: tuple[str, ...]) -> None:
    blocks(session, *options)
    # 60 to 70 blocks, each in it with 1 %: 0.6 to 0.7, and two standard errors of 0.83.
    for count, agrees in ((0, True), (2, True), (3, False)):
        found = beside(session, kv_block_lifetime_seconds_count=count)
        assert found.all.agrees == agrees, count
    note = found.rows["kv_block_lifetime_seconds_count"].note
    assert note is not None
    assert "a sample of 1 %" in note


def test_a_page_of_another_engine_is_doubted(session: SessionBuilder) -> None:
    lookups(session)
    found = beside(session, cache_config_info=500)
    assert found.all.doubts == (
        "The page is of an engine with 500 blocks, and the session of one with 101.",
    )
    assert not found.all.agrees
    assert beside(session, cache_config_info=101).all.doubts == ()
    assert beside(session, -5.0, cache_config_info=101).all.doubts == (
        "The page was taken before the session began.",
    )


PAUSED = [{"role": "engine", "rank": 0, "pauses": [[0.2, 0.5]]}]


def test_what_a_pause_left_out_is_explained(session: SessionBuilder) -> None:
    """vLLM's counters go on in a pause, and none of them can have less than the session."""
    lookups(session)
    session.metadata(processes=PAUSED)
    found = beside(session, prefix_cache_queries_total=1000, prefix_cache_hits_total=31)
    queries = found.rows["prefix_cache_queries"]
    assert queries.verdict == "explained"
    assert queries.parts[-1].says == (
        "what came before or after the session's period, or in a pause of its recording"
    )
    assert found.rows["prefix_cache_hits"].verdict == "unexplained"
    assert beside(session, prefix_cache_queries_total=1000).all.agrees


@pytest.mark.parametrize(("until", "agrees"), [(None, True), (9.0, False)])
def test_usage_of_a_pause_is_not_known(
    session: SessionBuilder, until: float | None, agrees: bool
) -> None:
    session.usage((1, 40), *([(9.5, 40)] if until else []))
    session.metadata(processes=[{"role": "engine", "rank": 0, "pauses": [[8.0, until]]}])
    assert beside(session, kv_cache_usage_perc=0.9).all.agrees is agrees


def test_several_engines_are_added_up(session: SessionBuilder) -> None:
    session.lookups(
        {"request_id": "a", "query_tokens": 100, "hit_tokens": 0, "engine": 0},
        {"request_id": "b", "query_tokens": 30, "hit_tokens": 0, "engine": 1},
    )
    two = HEAD + "".join(
        f'vllm:prefix_cache_queries_total{{engine="{rank}"}} {value}\n'
        for rank, value in ((0, 100.0), (1, 30.0))
    )
    found = reconcile(open_session(session.folder), parse(two, "page"))
    assert found.rows[0].verdict == "equal"
    assert found.rows[0].vllm == 130


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("<html>not found</html>", "is not a page of Prometheus metrics"),
        ("vllm:x{y=1} z\n", "is not a page of Prometheus metrics"),
        ("", "has no metric of vLLM's: none begins with vllm:; name"),
        ("vllm_num_requests_running 1\n", r"they begin with vllm_ here \(vllm_num_requests_runn"),
        ("kserve_vllm:prompt_tokens_total 1\n", "they begin with kserve_vllm: here"),
        ("ray_vllm_prompt_tokens_total 1\n", "they begin with ray_vllm_ here"),
        ("go_threads 7\n", "has no metric of vLLM's"),
    ],
)
def test_a_text_that_is_no_page_is_one_line(content: str, said: str) -> None:
    with pytest.raises(SessionError, match=said):
        parse(content, "page")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_is_not_compared(session: SessionBuilder, value: float) -> None:
    lookups(session)
    found = beside(session, prefix_cache_queries_total=value, prefix_cache_hits_total=32)
    row = found.rows["prefix_cache_queries"]
    assert (row.vllm, row.difference, row.verdict) == (None, None, "not comparable")
    assert "the page has no number for it" in text.render(found.all)
    # A mean that is no number is left out.
    blocks(session, "--kv-cache-metrics-sample=1.0")
    found = beside(session, kv_block_lifetime_seconds_count=60, kv_block_lifetime_seconds_sum=value)
    assert found.rows["kv_block_lifetime_seconds, mean"].vllm is None


@given(st.data())
def test_any_page_is_read_or_refused(data: st.DataObject) -> None:
    """A page with pieces cut out, doubled or replaced."""
    content = page(prefix_cache_queries_total=150, num_preemptions_total=1, cache_config_info=5)
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(content)))
        end = begin + data.draw(st.integers(0, 9))
        odd = st.sampled_from(["NaN", "{", "}", '"', "=", ",", "#", "\n", "1e999", "\\", "{a=", ""])
        content = content[:begin] + data.draw(st.one_of(odd, st.text(max_size=4))) + content[end:]
    with suppress(SessionError):
        parse(content, "page")


def test_a_missing_parser_is_one_line(session: SessionBuilder, tmp_path: Path) -> None:
    saved = tmp_path / "metrics.txt"
    saved.write_text(page(prefix_cache_queries_total=150))
    program = (
        "import sys; sys.modules['prometheus_client'] = None; from profilemate.cli import main; "
        f"sys.argv = ['profilemate', 'reconcile', {str(session.folder)!r}, '--metrics-file', "
        f"{str(saved)!r}]; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"profilemate: prometheus_client is not installed: pip install '{ROOT}[analysis]'\n"
    )


def test_every_key_is_documented(session: SessionBuilder) -> None:
    requests(session)
    found = beside(session, -5.0, prompt_tokens_total=1)
    documented = set()
    for line in DOCUMENTATION.read_text().splitlines():
        if line.startswith("| `"):
            documented |= set(line.split("|")[1].replace("`", "").replace(" ", "").split(","))
    from analysis.renderers import json as rendered

    assert set(keys(json.loads(rendered.render(found.all)))) - documented == set()


def test_the_text_says_how_far_the_session_goes(session: SessionBuilder) -> None:
    lookups(session)
    found = beside(session, 5.0, prefix_cache_queries_total=150)
    shown = text.render(found.all)
    assert "taken at 5.00 s of the session's 10.00 s" in shown
    assert shown.splitlines()[-1] == "vLLM and the session agree."
