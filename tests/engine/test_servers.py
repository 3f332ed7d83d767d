# SPDX-License-Identifier: Apache-2.0
"""Two servers of ``vllm serve``.

The first is under load: the tables against vLLM's own metrics and what its client saw. Of the
second the collector is killed under load, then the API server, then the engine. Nobody is left to
complete the tables, so the analyzer does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from analysis import open_session
from analysis.engine_metrics import parse, reconcile
from demo.server import Server
from profilemate import collector
from tests.support import engine
from tests.support.engine import START_SECONDS, Answer, Lab, answer
from tests.support.scheduler import tokens

pytestmark = pytest.mark.engine

BENCH_PROMPTS = 40
BENCH_OUTPUT = 40
FIRST_OUTPUT = 20


@dataclass(frozen=True)
class Served:
    """What was seen from outside of a server that has ended."""

    session: Path
    log: str
    rows_while_running: int
    """Rows of requests.jsonl once the first answer's had appeared, with the server running."""
    usage_gauge: set[float]
    """Values of vLLM's gauge while it was under load, as a percentage with two decimals."""
    metrics: str
    """vLLM's metrics when all was done."""
    metrics_under_load: tuple[str, float]
    """vLLM's metrics while it was under load, and when, in seconds since 1970."""
    bench_log: str


@pytest.fixture(scope="module")
def served(servers: tuple[Server, Server], lab: Lab) -> Served:
    server = servers[0]
    port = server.port
    session = engine.session_of(server, lab.sessions("servers"))
    answer(port, tokens(1, 100), FIRST_OUTPUT)
    engine.wait_for(
        "the row of a finished request",
        lambda: engine.requests(session),
        engine.SETTLED_SECONDS,
    )
    rows_while_running = len(engine.requests(session))
    with lab.slow_answers() as slow:
        Answer(port, tokens(2, 100), 1500, **slow).read(5).close()
        engine.wait_for(
            "the row of a request that was left",
            lambda: len(engine.requests(session)) > rows_while_running,
            engine.SETTLED_SECONDS,
        )
    bench_log, under_load, pages = load(lab, port)
    usage_gauge = {
        round(100 * engine.metric(page, "vllm:kv_cache_usage_perc"), 2) for page in pages
    }
    metrics = engine.get(port, "/metrics")
    server.stop()
    engine.wait_for(
        "the session to be complete and its collector to be gone",
        lambda: engine.metadata(session).get("complete") and not engine.processes_about(session),
        engine.SETTLED_SECONDS,
    )
    log = server.log.read_text(errors="replace")
    return Served(session, log, rows_while_running, usage_gauge, metrics, under_load, bench_log)


def load(lab: Lab, port: int) -> tuple[str, tuple[str, float], list[str]]:
    """Run ``vllm bench serve``, and take vLLM's metrics meanwhile: what it said, a page from when
    its first requests ran, with the time, and all pages."""
    pages: list[str] = []

    def runs() -> bool:
        pages.append(engine.get(port, "/metrics"))
        return engine.metric(pages[-1], "vllm:num_requests_running") > 1

    options = engine.bench_options(lab.model, port, BENCH_PROMPTS, BENCH_OUTPUT)
    with ThreadPoolExecutor(1) as clients:
        # They run until the page is there, and most of the others come after it.
        with lab.slow_answers() as slow:
            bench = clients.submit(lab.vllm, "bench", *options, f"--extra-body={json.dumps(slow)}")
            engine.wait_for("requests that run", runs, START_SECONDS)
            under_load = pages[-1], time.time()
        while not bench.done():
            pages.append(engine.get(port, "/metrics"))
            time.sleep(0.05)
    return bench.result(), under_load, pages


def test_two_servers_have_a_session_each(servers: tuple[Server, Server], lab: Lab) -> None:
    names = [session.name for session in engine.sessions(lab.sessions("servers"))]
    assert len(names) == 2
    for server in servers:
        assert sum(f"_{server.process.pid}_" in name for name in names) == 1


def test_the_session_is_sound(served: Served) -> None:
    engine.assert_sound(served.session)


def test_rows_appear_while_the_server_runs(served: Served) -> None:
    assert served.rows_while_running == 1
    assert engine.metadata(served.session)["cost"]["collector_lag_sec"] > 0


def test_the_bench_is_in_the_tables(served: Served) -> None:
    assert f"Successful requests:                     {BENCH_PROMPTS}" in served.bench_log
    answered = [row for row in engine.requests(served.session) if row["finish_reason"] == "length"]
    lengths = Counter(row["output_length"] for row in answered)
    # The first answer of all, the bench's and, in some releases, one that it tries out first.
    assert lengths[FIRST_OUTPUT] == 1
    assert len(answered) - 1 == lengths[BENCH_OUTPUT] in (BENCH_PROMPTS, BENCH_PROMPTS + 1)
    asked = sum(row["input_length"] for row in engine.requests(served.session))
    assert asked == engine.metric(served.metrics, "vllm:prompt_tokens_total")
    assert engine.rows(served.session, "kv_cache_evictions"), "the load must overflow the pool"


def test_hits_are_those_that_vllm_counts(served: Served) -> None:
    lookups = [
        row
        for row in engine.rows(served.session, "prefix_cache_lookups")
        if row["admitted"] == "1" and row["kind"] in ("first", "retry")
    ]
    queries, hits = (
        engine.metric(served.metrics, f"vllm:prefix_cache_{name}_total")
        for name in ("queries", "hits")
    )
    assert engine.total(lookups, "query_tokens") == queries
    assert engine.total(lookups, "hit_tokens") == hits > 0
    assert sum(row["hit_tokens"] for row in engine.requests(served.session)) == hits


def test_requests_are_those_that_vllm_counts(served: Served) -> None:
    answered = engine.requests(served.session)
    reasons = Counter(row["finish_reason"] for row in answered)
    assert reasons["abort"] == 1, "the client that left"
    for reason in ("length", "stop", "error"):
        counted = engine.metric(
            served.metrics, "vllm:request_success_total", finished_reason=reason
        )
        assert reasons[reason] == counted
    steps = engine.rows(served.session, "scheduler_steps")
    assert engine.total(steps, "preempted_reqs") == engine.metric(
        served.metrics, "vllm:num_preemptions_total"
    )
    assert engine.total(steps, "finished_reqs") == len(answered)


def test_an_aborted_request_says_how_far_it_came(served: Served) -> None:
    (aborted,) = (row for row in engine.requests(served.session) if row["finish_reason"] == "abort")
    assert aborted["input_length"] == 100
    assert 5 <= aborted["output_length"] < 1500
    assert aborted["computed_tokens"] >= 100 + 4


def test_usage_is_what_vllms_gauge_shows(served: Served) -> None:
    recorded = {float(row["usage_pct"]) for row in engine.rows(served.session, "kv_cache_usage")}
    assert len(served.usage_gauge) > 1, "the gauge was not seen to move"
    assert served.usage_gauge <= recorded | {0.0}
    assert engine.metric(served.metrics, "vllm:kv_cache_usage_perc") == 0


def test_vllms_metrics_agree_with_the_session(served: Served) -> None:
    session = open_session(served.session)
    found = reconcile(session, parse(served.metrics, "metrics"))
    rows = {row.metric.removeprefix("vllm:"): row for row in found.rows}
    assert (found.missing, found.doubts) == ((), ())
    equal = ("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "num_preemptions")
    assert {rows[name].verdict for name in equal} == {"equal"}
    # One client left. vLLM does not count its request as ended.
    assert rows['request_success{finished_reason="abort"}'].difference == -1
    # The load overflows the pool. All that it reuses has content, but for requests' last blocks.
    lifetimes = rows["kv_block_lifetime_seconds_count"]
    assert lifetimes.session is not None
    assert lifetimes.vllm is not None
    assert lifetimes.vllm > lifetimes.session > 0
    assert found.agrees, [row for row in found.rows if row.verdict == "unexplained"]


def test_a_page_from_under_load_agrees_as_well(served: Served) -> None:
    page, taken = served.metrics_under_load
    found = reconcile(open_session(served.session), parse(page, "metrics", taken))
    queries = next(row for row in found.rows if row.metric == "vllm:prefix_cache_queries")
    assert queries.difference is not None
    assert queries.difference < 0, "the load went on after it"
    assert found.agrees, [row for row in found.rows if row.verdict == "unexplained"]


def test_vllm_knows_our_variables(served: Served) -> None:
    # It would not have started; it says so of others, as test_several_processes shows.
    assert "Unknown vLLM environment variable" not in served.log


def test_clients_leave_nothing(served: Served, lab: Lab) -> None:
    assert "profilemate" not in served.bench_log
    assert not lab.sessions("bench").exists()
    assert "profilemate" not in lab.vllm("help", "--help")
    assert not lab.sessions("help").exists()


SHORT, LONG, ENDLESS = 30, 400, 1800
"""Tokens asked for."""
READ = 5
"""Tokens read of an answer before something is killed."""


@dataclass(frozen=True)
class Killed:
    """What was seen, and the session as the analyzer left it."""

    session: Path
    answers: list[Answer]
    """Four short ones, one whose collector was killed half-way, one whose API server was."""
    caught_up: dict[str, bytes]
    """The tables when the collector had seen the short answers."""
    cut_off: dict[str, bytes]
    """The tables after the collector had been killed."""
    before: Path
    """A session made of the journal as it was just before the API server was killed."""
    summary: dict[str, Any]
    """What the analyzer said, as JSON."""


@pytest.fixture(scope="module")
def killed(servers: tuple[Server, Server], lab: Lab) -> Killed:
    server = servers[1]
    session = engine.session_of(server, lab.sessions("servers"))
    (engine_pid,) = engine.wait_for_engines(session, 1).values()
    collector_pid = engine.collector_pid(session)
    answers = [answer(server.port, tokens(seed, 150), SHORT) for seed in range(4)]
    engine.wait_for(
        "rows of the short answers",
        lambda: len(engine.requests(session)) == len(answers),
        engine.SETTLED_SECONDS,
    )
    caught_up = engine.tables(session)

    with lab.slow_answers() as slow:
        answers.append(Answer(server.port, tokens(4, 150), LONG, **slow).read(READ))
        engine.kill(collector_pid)
        cut_off = engine.tables(session)
    answers[-1].read()

    with lab.slow_answers() as slow:
        answers.append(Answer(server.port, tokens(5, 150), ENDLESS, **slow).read(READ))
        before = engine.copy_journal(session, lab.folder / "before the server's death")
        engine.kill(server.process.pid)
        answers[-1].read()
        size = engine.journal_size(session)
        engine.wait_for(
            "the engine to go on", lambda: engine.journal_size(session) > size, engine.END_SECONDS
        )
        # Whatever collector the engine started goes before it: nobody follows it to its end.
        engine.stop(engine_pid)
        engine.kill(*engine.collector_pids(session))
        engine.kill(engine_pid)
    collector.finalize(before)
    return Killed(session, answers, caught_up, cut_off, before, analyze(session))


def analyze(session: Path) -> dict[str, Any]:
    """What ``python -m analysis --json`` says of a session, without a replay of its advice."""
    done = subprocess.run(
        [sys.executable, "-m", "analysis", str(session), "--json", "--no-replay"],
        cwd=engine.ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_answers_do_not_depend_on_the_collector(killed: Killed) -> None:
    *whole, _ = killed.answers
    assert [len(answer.tokens) for answer in whole] == [SHORT] * 4 + [LONG]
    assert {answer.finish_reason for answer in whole} == {"length"}
    assert killed.answers[-1].finish_reason is None
    # The fifth answer was under way.
    assert killed.cut_off["requests.jsonl"].count(b"\n") == 4


def test_the_analyzer_completes_the_session(killed: Killed) -> None:
    assert killed.summary["session"]["state"] == "complete"
    known = engine.metadata(killed.session)
    assert known["complete"]
    assert [process["ended"] for process in known["processes"]] == ["killed"]
    assert known["cost"]["collector_lag_sec"] is None, "nobody followed it to its end"
    assert not (killed.session / "journal").exists()
    assert len(engine.requests(killed.session)) == 5


def test_every_token_that_reached_the_client_is_in_the_tables(killed: Killed) -> None:
    # The step that computes a prompt makes the first token, the others are decoded.
    decoded = sum(len(answer.tokens) - 1 for answer in killed.answers)
    steps = engine.rows(killed.session, "scheduler_steps")
    assert engine.total(steps, "decode_tokens") >= decoded
    assert steps[-1]["decode_tokens"] == "1", "it was not killed in the middle of an answer"


def test_tables_are_the_same_however_they_are_made(killed: Killed) -> None:
    whole = engine.tables(killed.session)
    engine.assert_begin_the_same(killed.caught_up, whole)
    engine.assert_begin_the_same(killed.cut_off, whole)
    engine.assert_begin_the_same(engine.tables(killed.before), whole)
