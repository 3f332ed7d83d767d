# SPDX-License-Identifier: Apache-2.0
"""Traces in Perfetto's own trace processor: its answers are the summary's figures."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from analysis import Summary, open_session, summarize
from tests.analysis.invoke import invoke
from tests.export.trace_processor import TraceProcessor, opened, served
from tests.situations.bench import Bench
from tests.support.scheduler import tokens

ARGUMENT = "extract_arg(arg_set_id, 'debug.{}')"


@pytest.fixture
def session(bench: Bench) -> Path:
    """Thirty requests with one beginning in a pool that is too small for them."""
    luck = random.Random(1)
    engine = bench.engine(40, max_num_seqs=8, max_num_batched_tokens=64)
    for number in range(30):
        prompt = tokens(0, 32) + tokens(number + 1, luck.randrange(20, 120))
        engine.add(bench.request(f"r{number}", prompt, luck.randrange(5, 60)))
        engine.step(2)
    engine.run()
    return engine.end().folder


@pytest.fixture
def trace(session: Path) -> Path:
    assert invoke("export", "perfetto", session).returncode == 0
    return session / "trace.pftrace"


@pytest.fixture
def perfetto(browser: Browser, trace: Path) -> Iterator[TraceProcessor]:
    with opened(browser, trace) as found:
        yield found


def argument(name: str) -> str:
    return ARGUMENT.format(name)


def test_it_has_the_summarys_figures(session: Path, perfetto: TraceProcessor) -> None:
    summary: Summary = summarize(open_session(session))
    assert summary.preemptions.count
    assert summary.evictions.total.blocks

    def of(name: str, what: str) -> int:
        return int(perfetto.one(f"select {what} from slice where name = '{name}'") or 0)

    assert of("request", "count(*)") == summary.requests.ended == 30
    for name, figure in (
        ("input_length", summary.requests.input_tokens),
        ("output_length", summary.requests.output_tokens),
        ("hit_tokens", summary.prefix_cache.true.hit_tokens),
    ):
        assert of("request", f"sum({argument(name)})") == figure
    assert of("evicted", f"sum({argument('blocks')})") == summary.evictions.total.blocks
    assert of("preempted", "count(*)") == summary.preemptions.count
    recomputed = of("preempted", f"sum({argument('recomputed_tokens')})")
    assert recomputed == summary.preemptions.recomputed_tokens
    steps = perfetto.one(
        f"select sum(coalesce({argument('repeats')}, 1)) from slice "
        "where name in ('prefill', 'decode', 'mixed', 'idle') and depth = 0"
    )
    assert steps == summary.preemptions.steps
    peak = perfetto.one(
        "select max(value) from counter join counter_track on counter.track_id = counter_track.id "
        "where counter_track.name = 'held'"
    )
    assert peak == summary.usage.pools[0].peak.held_blocks


def test_it_finds_no_fault(perfetto: TraceProcessor) -> None:
    faults = perfetto.query(
        "select name, value from stats where value > 0 "
        "and (severity in ('error', 'data_loss') or name like '%skipped%')"
    )
    assert [vars(fault) for fault in faults] == []


def test_arrows_lead_from_a_victim_to_who_took_its_place(perfetto: TraceProcessor) -> None:
    rows = perfetto.query(
        "select victim_track.name as victim, taker_track.name as taker, "
        "extract_arg(victim.arg_set_id, 'debug.made_room_for') as told, "
        "extract_arg(taker.arg_set_id, 'debug.victim') as told_back "
        "from flow join slice victim on flow.slice_out = victim.id "
        "join slice taker on flow.slice_in = taker.id "
        "join track victim_track on victim.track_id = victim_track.id "
        "join track taker_track on taker.track_id = taker_track.id "
        "where taker.name = 'preempts'"
    )
    assert rows
    assert all((row.told, row.told_back) == (row.taker, row.victim) for row in rows)


def test_a_profile_of_torchs_is_beside_the_session(
    browser: Browser, session: Path, tmp_path: Path
) -> None:
    """Of the same run: a launch in the third step, and its kernel."""
    trace = tmp_path / "with.pftrace"
    began = open_session(session).metadata["started_at"]
    began_us = datetime.fromisoformat(began.replace("Z", "+00:00")).timestamp() * 1e6
    launch = {"ph": "X", "name": "launch", "pid": 7, "tid": 7, "ts": 30_000, "dur": 10}
    kernel = {"ph": "X", "name": "kernel", "pid": 0, "tid": 3, "ts": 30_005, "dur": 20}
    arrow = {"ph": "s", "cat": "ac2g", "id": 1, "pid": 7, "tid": 7, "ts": 30_000}
    to = arrow | {"ph": "f", "pid": 0, "tid": 3, "ts": 30_005}
    profile = tmp_path / "profile.json"
    content = {"baseTimeNanoseconds": int(began_us) * 1000}
    profile.write_text(json.dumps(content | {"traceEvents": [launch, kernel, arrow, to]}))
    done = invoke("export", "perfetto", session, "--torch", profile, "-o", trace)
    assert done.returncode == 0, done.stderr
    with opened(browser, trace) as perfetto:
        step = perfetto.one(
            "select ts from slice where name in ('prefill', 'decode', 'mixed') and depth = 0 "
            "order by ts limit 1 offset 2"
        )
        (row,) = perfetto.query(
            "select launch.ts as launched, kernel.ts as ran, kernel.dur as took from flow "
            "join slice launch on flow.slice_out = launch.id "
            "join slice kernel on flow.slice_in = kernel.id where launch.name = 'launch'"
        )
    assert abs(row.launched - step) < 1_000_000
    assert (row.ran - row.launched, row.took) == (5_000, 20_000)


def test_the_user_interface_shows_it(browser: Browser, trace: Path) -> None:
    with served(trace) as (address, _):
        page = browser.new_page()
        page.goto(address)
        page.wait_for_selector("text=Engine 0", timeout=120_000)
        page.wait_for_function("!app.isLoadingTrace", timeout=120_000)
        tracks = page.evaluate(
            """() => {
                const engine = app.trace.workspace.children.find(one => one.name === 'Engine 0');
                return engine.children.map(node => [node.name, node.children.length]);
            }"""
        )
        page.close()
    assert tracks == [
        ["Steps", 0],
        ["Tokens of a step", 2],
        ["Requests", 30],
        ["Pool 0", 3],
        ["Running and waiting", 2],
    ]
