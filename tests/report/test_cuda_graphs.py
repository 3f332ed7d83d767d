# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs and GPU memory: what is drawn is what the tables and the summary say."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from plotly import graph_objects

from analysis import open_session, series, summarize
from analysis.renderers.html import chart, page
from analysis.renderers.html.report import Report
from analysis.series import executions, gpu_memory
from analysis.series.bins import of_session
from analysis.series.executions import BatchSize
from analysis.summary import Summary
from tests.analysis.builder import SessionBuilder
from tests.analysis.graphs import (
    GIB,
    MIB,
    SETUP,
    captured,
    eager,
    full,
    on_the_gpu,
    piecewise,
    ran,
    replayed,
    set_up,
)
from tests.report.conftest import made
from tests.report.opened import Opened
from tests.report.test_page import HOSTILE, drawn
from tests.report.test_series import opened as opened_session

MEGABYTE = 1_000_000
DRAWN = {"executions", "batch-sizes", "used-memory"}
BARS = {"eager", "ledger", "start-up", "graph-memory"}


class TestOverTime:
    def test_modes_and_padding(self, session: SessionBuilder) -> None:
        set_up(session)
        ran(session, full(8), 6, 3, timestamp_sec=0.5)
        ran(session, full(8), 8, timestamp_sec=0.9)
        ran(session, piecewise(16), 10, 2, timestamp_sec=2.5, num_graphs=3)
        ran(session, eager(40), 40, 5, timestamp_sec=2.5)
        # Sent to a graph, and none was replayed; and what served nobody.
        ran(session, piecewise(16), 10, 4, timestamp_sec=3.5, num_graphs=0)
        ran(session, full(8), 1, 9, timestamp_sec=0.5, dummy=1)
        found = executions.measure(*opened_session(session))
        nothing = (0.0,) * 10
        assert list(found.rate) == ["FULL", "PIECEWISE", "NONE"]
        assert found.rate == {
            "FULL": (4, *nothing[1:]),
            "PIECEWISE": (0, 0, 2, *nothing[3:]),
            "NONE": (0, 0, 5, 4, *nothing[4:]),
        }
        # 6 of 4 x 8, then 12 of 2 x 16; what ran eagerly pads nothing.
        assert found.padding == pytest.approx((6 / 32, None, 12 / 32, *[None] * 7))
        assert found.batches == (
            BatchSize(6, 6, {"FULL": 3}, 6),
            BatchSize(8, 8, {"FULL": 1}, 0),
            BatchSize(10, 10, {"NONE": 4, "PIECEWISE": 2}, 12),
            BatchSize(40, 40, {"NONE": 5}, 0),
        )

    def test_warm_up_is_left_out(self, session: SessionBuilder) -> None:
        ran(session, full(8), 6, timestamp_sec=3.5)
        ran(session, full(8), 8, timestamp_sec=4.5)
        found = executions.measure(*opened_session(session, after_sec=4))
        assert found.rate == {"FULL": (1, 0, 0, 0, 0, 0)}
        assert found.batches == (BatchSize(8, 8, {"FULL": 1}, 0),)

    def test_bins_are_as_wide_as_they_are(self, session: SessionBuilder) -> None:
        ran(session, full(8), 8, 5, timestamp_sec=3)
        whole = open_session(session.folder)
        found = executions.measure(whole, of_session(whole, 5))
        assert found.rate == {"FULL": (0, 2.5, 0, 0, 0)}

    def test_gpus(self, session: SessionBuilder) -> None:
        set_up(session)
        samples = [(0.2, 0, 10, 40), (0.8, 0, 30, 60), (0.9, 0, 20, ""), (2.5, 0, 5, 8)]
        session.rows(
            "gpu_memory.csv",
            *(
                {"timestamp_sec": at, "gpu": gpu, "used_bytes": used, "free_bytes": 1}
                | {"utilization_pct": busy}
                for at, gpu, used, busy in [(0.1, 3, 7, ""), *samples]
            ),
        )
        found = gpu_memory.measure(*opened_session(session))
        assert [one.gpu for one in found] == [0, 3]
        assert found[0].used == (30, None, 5, *[None] * 7)
        assert found[0].busy == (50, None, 8, *[None] * 7)
        assert (found[1].used[0], found[1].busy) == (7, (None,) * 10)


def counted_with(tokens: int) -> tuple[int, int]:
    """The sizes that share a bar with this one: 32 parts of each doubling, from 64 tokens on."""
    width = 1
    while 64 * width < tokens:
        width *= 2
    last = -(-tokens // width) * width
    return last - width + 1, last


@pytest.mark.parametrize("largest", [300, 2**31 - 1])
def test_batches_of_any_size_are_some_hundred_bars(session: SessionBuilder, largest: int) -> None:
    draw = random.Random(4)
    sizes = [int(largest ** draw.random()) for _ in range(5_000)]
    sizes += [2**power + more for power in range(2, 8) for more in (-1, 0, 1)]
    for tokens in sizes:
        ran_eagerly(session, tokens)
    expected = Counter(map(counted_with, sizes))
    found = executions.measure(*opened_session(session)).batches
    bars = {(batch.from_tokens, batch.to_tokens): batch.by_mode["NONE"] for batch in found}
    assert list(bars) == sorted(expected)
    assert bars == expected
    assert len(bars) < 64 + 32 * 25


def ran_eagerly(session: SessionBuilder, tokens: int) -> None:
    session.rows("cuda_graph_timeline.csv", eager(tokens))


def report_of(session: SessionBuilder) -> Report:
    found = open_session(session.folder)
    summary = summarize(found)
    return Report(summary, series.measure(found, summary))


def charts_of(session: SessionBuilder) -> dict[str, chart.Chart]:
    sections = page.sections_of(report_of(session))
    return {part.key: part for section in sections for part in section.charts}


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> SessionBuilder:
    """Two workers, one GPU that was sampled, and something of everything."""
    session = SessionBuilder(tmp_path_factory.mktemp("gpu") / "session_gpu")
    on_the_gpu(session)
    return session


@pytest.fixture(scope="module")
def summary(gpu: SessionBuilder) -> Summary:
    return summarize(open_session(gpu.folder))


@pytest.fixture(scope="module")
def shown(browser: Browser, gpu: SessionBuilder) -> Iterator[Page]:
    """Its page, which nothing may go wrong in."""
    with Opened(browser) as opened:
        yield opened(made(gpu.folder))
        assert opened.trouble == []


def bars(page: Page, key: str) -> list[tuple[str, str]]:
    """The labels and figures of a list of bars."""
    found = page.eval_on_selector_all(
        f"#{key} .bars li",
        "all => all.map(e => [...e.querySelectorAll('span')].map(s => s.innerText))",
    )
    return [(label, figure) for label, figure in found]


def rows(page: Page, key: str) -> list[list[str]]:
    """The table under a chart."""
    found: list[list[str]] = page.eval_on_selector_all(
        f"#{key} tbody tr", "all => all.map(e => [...e.children].map(cell => cell.textContent))"
    )
    return [[cell.replace("\u00a0", " ") for cell in row] for row in found]


class TestPage:
    def test_all_is_drawn(self, shown: Page) -> None:
        for section, keys in (
            ("cuda-graphs", {"executions", "eager", "batch-sizes", "ledger"}),
            ("gpu-memory", {"start-up", "graph-memory", "used-memory"}),
        ):
            figures = shown.eval_on_selector_all(f"#{section} figure", "all => all.map(e => e.id)")
            assert set(figures) == keys
        empty = shown.eval_on_selector_all(
            "#cuda-graphs [data-chart], #gpu-memory [data-chart]",
            "all => all.filter(e => !e.querySelector('.trace path')).map(e => e.dataset.chart)",
        )
        assert empty == []
        titles = shown.evaluate(
            """() => [...document.querySelectorAll('[data-chart]')].flatMap(plot =>
                Object.entries(plot._fullLayout).filter(([name]) => /^[xy]axis\\d*$/.test(name))
                    .map(([_, axis]) => axis.title.text))"""
        )
        assert all(titles)

    def test_the_key_figure(self, shown: Page, summary: Summary) -> None:
        tile = shown.locator("[data-key='cuda_graphs.execution_share']")
        # 22 of 28 executions.
        assert float(tile.get_attribute("data-value") or "") == summary.cuda_graphs.execution_share
        assert tile.inner_text().replace("\u00a0", " ") == "78.57 %"

    def test_executions(self, shown: Page, summary: Summary) -> None:
        traces = drawn(shown, "executions")
        width = 0.1
        for use in summary.cuda_graphs.by_mode:
            y = traces["eager" if use.mode == "NONE" else use.mode]["y"]
            assert sum(y) * width == pytest.approx(use.executions, rel=1e-4)
            # All ran at 2 s.
            assert y.index(max(y)) == 20
        padding = [part for part in traces["padding"]["y"] if part is not None]
        assert padding == pytest.approx([100 * (summary.cuda_graphs.padding.share or 0)], rel=1e-4)
        by_mode = [(row[0], row[1], row[3]) for row in rows(shown, "executions")]
        assert by_mode == [("FULL", "20", "102"), ("PIECEWISE", "2", "10"), ("eager", "6", "160")]
        assert "FULL_AND_PIECEWISE, as asked for" in shown.inner_text("#executions figcaption")

    def test_why_the_rest_was_eager(self, shown: Page, summary: Summary) -> None:
        (part,) = summary.cuda_graphs.eager
        assert part.reason == "too_large"
        ((label, figure),) = bars(shown, "eager")
        assert (label, figure.replace("\u00a0", " ")) == ("Larger than any graph", "6 (21.43 %)")
        assert "30 (4 times), 20 (2 times)" in shown.inner_text("#eager figcaption")

    def test_batch_sizes_and_capture_sizes(self, shown: Page, summary: Summary) -> None:
        traces = drawn(shown, "batch-sizes")
        modes = {
            name: {x: y for x, y in zip(traces[name]["x"], traces[name]["y"], strict=True) if y}
            for name in ("FULL", "PIECEWISE", "eager", "padding")
        }
        assert modes == {
            "FULL": {3: 10, 8: 6, 6: 4},
            "PIECEWISE": {5: 2},
            "eager": {20: 2, 30: 4},
            "padding": {3: 10, 5: 6, 6: 8},
        }
        sizes = summary.capture_sizes
        assert sizes is not None
        assert sizes.least_padding is not None
        assert traces["today's"]["x"] == list(sizes.today.sizes) == [1, 2, 4, 8]
        assert traces["least padding"]["x"] == list(sizes.least_padding.sizes)
        lines = shown.evaluate(
            """() => document.querySelector('[data-chart=batch-sizes]').layout.shapes
                .map(shape => shape.x0)"""
        )
        assert lines == [1, 2, 4, 8]
        table = {row[0]: row[1:] for row in rows(shown, "batch-sizes")}
        padded = f"{sizes.today.padding:,}"
        assert (table["Today's"][0], table["Today's"][4], table["Today's"][6]) == (
            "4",
            padded,
            "1, 2, 4, 8",
        )

    def test_a_mark_stands_where_its_size_does(self, shown: Page) -> None:
        """The line at 8 tokens cuts the bar of 8: both know of the logarithmic axis."""
        line, bar = shown.evaluate(
            """() => {
                const plot = document.querySelector('[data-chart=batch-sizes]');
                const sides = (element) => {
                    const {left, right, height} = element.getBoundingClientRect();
                    return [left, right, height];
                };
                const lines = [...plot.querySelectorAll('.shapelayer path')].map(sides);
                const full = plot.querySelector('.subplot.xy .trace.bars');
                const bars = [...full.querySelectorAll('.point path')].map(sides);
                return [lines[3], bars.filter(([left, right, height]) => height).at(-1)];
            }"""
        )
        assert bar[0] < (line[0] + line[1]) / 2 < bar[1]

    def test_the_ledger(self, shown: Page, summary: Summary) -> None:
        ledger = summary.graph_ledger
        assert ledger is not None
        listed = bars(shown, "ledger")
        used = [graph for graph in ledger.graphs if graph.replays]
        assert [label for label, _ in listed[: len(used)]] == ["FULL 4", "FULL 8", "PIECEWISE 8"]
        assert listed[0][1] == "10 replays, 2.0 MiB, 250.0 ms"
        assert listed[1][1] == "10 replays, 32.0 MiB, 250.0 ms"
        alone, never = listed[len(used) :]
        assert alone[0] == "1 in dummy executions alone"
        assert never[0] == "4 never replayed"
        table = rows(shown, "ledger")
        assert len(table) == len(ledger.graphs) == 8
        for row, graph in zip(table, ledger.graphs, strict=True):
            assert row[0] == f"{graph.mode} {graph.num_tokens}"
            assert row[5] == (
                f"{graph.replays:,}" if graph.replays + graph.dummy_replays else "never"
            )
            assert (row[6], row[7]) == (f"{graph.dummy_replays:,}", f"{graph.tokens:,}")
        # Worker 0 captured the one first, and worker 1 the other.
        pays = {row[0]: row[3] for row in table if "(pool)" in row[3]}
        assert pays == {"PIECEWISE 8": "64.0 MiB (pool)", "FULL 8": "32.0 MiB (pool)"}

    def test_start_up(self, shown: Page, summary: Summary) -> None:
        widths = shown.eval_on_selector_all(
            "#start-up .bars li",
            "all => all.map(e => [...e.querySelectorAll('i')].map(i => parseFloat(i.style.width)))",
        )
        total = 80 * GIB
        for worker, parts in zip(summary.memory.workers, widths, strict=True):
            kv = worker.kv_allocated_bytes or 0
            known = [16 * GIB, 4 * GIB, GIB, 106 * MIB, kv]
            expected = [100 * part / total for part in [*known, total - sum(known)]]
            assert parts == pytest.approx(expected, abs=0.011)
        mark = shown.eval_on_selector("#start-up .bars b", "e => parseFloat(e.style.left)")
        assert mark == 90
        assert [row[8] for row in rows(shown, "start-up")] == ["50.0 GiB", "51.0 GiB"]
        said = shown.inner_text("#start-up figcaption")
        assert "72.0 GiB of 80.0 GiB were asked for, the upright line." in said
        assert "Worker 0 has the least for it, and decides." in said

    def test_estimate_and_measured(self, shown: Page, summary: Summary) -> None:
        assert bars(shown, "graph-memory") == [
            ("reserved, by vLLM's estimate", "500.0 MiB"),
            ("taken, as vLLM found", "106.0 MiB"),
            ("sum of the single captures", "106.0 MiB"),
        ]
        # 394 MiB of 2 MiB a block.
        assert "4.72 times" in shown.inner_text("#graph-memory figcaption")
        assert "197 blocks too few" in shown.inner_text("#graph-memory figcaption")

    def test_used_memory(self, shown: Page) -> None:
        traces = drawn(shown, "used-memory")
        used, busy = traces["GPU 0 (H100)"], traces["GPU 0"]
        assert [value for value in used["y"] if value is not None] == [70, 72]
        assert [value for value in busy["y"] if value is not None] == [50, 50]
        assert set(traces["total"]["y"]) == {80}
        said = shown.inner_text("#used-memory figcaption")
        assert "At least 8.0 GiB was free at any time." in said

    def test_a_phone_needs_no_sideways_scrolling(self, opened: Opened, gpu: SessionBuilder) -> None:
        page = opened(gpu.folder / "report.html", width=360, has_touch=True, is_mobile=True)
        for details in page.query_selector_all("summary"):
            details.click()
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_plotly_knows_every_name(gpu: SessionBuilder) -> None:
    figures = {key: part.figure for key, part in charts_of(gpu).items() if key in DRAWN | BARS}
    assert set(figures) == DRAWN | BARS
    for key in DRAWN:
        text = re.sub(r"var\(--[a-z-]+\)", "red", json.dumps(figures[key]))
        graph_objects.Figure(json.loads(text))


def test_a_ledger_of_67_graphs_is_short(session: SessionBuilder) -> None:
    set_up(session)
    graphs = [full(size) for size in range(1, 35)] + [piecewise(size) for size in range(1, 34)]
    captured(session, graphs, memory_bytes=MIB)
    for size in range(1, 15):
        ran(session, full(size), size, size)
    for graph in graphs[14:]:
        replayed(session, graph, 0)
    ledger = charts_of(session)["ledger"]
    assert isinstance(ledger.figure, chart.Bars)
    assert ledger.table is not None
    # The ten with the most replays, and the 53 that had none as one.
    assert ledger.figure.labels == [
        *(f"FULL {size}" for size in range(14, 4, -1)),
        "53 never replayed",
    ]
    # 4 + 3 + 2 + 1.
    assert "4 more graphs had 10 replays." in ledger.words
    assert [row[5] for row in ledger.table.rows].count("never") == 53
    assert len(ledger.table.rows) == 67


def test_without_a_gpu_one_line_says_so(opened: Opened, session: SessionBuilder) -> None:
    session.metadata(device="cpu")
    page = opened(made(session.folder))
    assert page.query_selector_all("[data-chart]") == []
    figures = page.eval_on_selector_all("#cuda-graphs figure", "all => all.map(e => e.id)")
    assert figures == ["executions"]
    assert page.inner_text("#executions .nothing") == "There are none: the engine ran on the CPU."
    assert page.query_selector_all("#gpu-memory, [href='#gpu-memory']") == []
    assert page.query_selector_all("[data-key^=cuda_graphs]") == []


def test_graphs_that_served_nobody_are_in_the_ledger(session: SessionBuilder) -> None:
    set_up(session)
    captured(session, [full(8), full(4)], memory_bytes=MIB)
    ran(session, full(8), 1, 3, dummy=1)
    replayed(session, full(4), 0)
    charts = charts_of(session)
    assert charts["executions"].figure is None
    assert "Nothing was executed for a request" in charts["executions"].words
    assert isinstance(charts["ledger"].figure, chart.Bars)
    assert charts["ledger"].figure.labels == ["1 in dummy executions alone", "1 never replayed"]
    assert "batch-sizes" not in charts


def test_an_eager_engine_has_no_panel_of_padding(session: SessionBuilder) -> None:
    off = {**SETUP, "asked": "NONE", "resolved": "NONE", "capture_sizes": None}
    set_up(session, cuda_graphs=off)
    ran(session, eager(9), 9, 4)
    charts = charts_of(session)
    for key in ("executions", "batch-sizes"):
        figure = charts[key].figure
        assert isinstance(figure, dict)
        assert [trace["name"] for trace in figure["data"]] == ["eager"]
        assert not {"yaxis2", "yaxis3"} & set(figure["layout"])
    assert {"ledger", "start-up", "graph-memory", "used-memory"}.isdisjoint(charts)
    assert "The mode is NONE, as asked for." in charts["executions"].words


def test_batches_that_need_no_other_size(session: SessionBuilder) -> None:
    """Eager for another reason than their size; and with no token at all."""
    set_up(session)
    captured(session, [full(8)])
    ran(session, eager(0), 0)
    found = charts_of(session)["batch-sizes"]
    assert (found.figure, found.words) == (None, "No batch had a token.")
    ran(session, eager(5), 5)
    found = charts_of(session)["batch-sizes"]
    assert isinstance(found.figure, dict)
    assert [trace["x"] for trace in found.figure["data"]] == [[5]]
    assert found.words == "2 executions. Above 64 tokens a bar counts several sizes."


def test_what_the_mode_was_resolved_to(session: SessionBuilder) -> None:
    resolved = {**SETUP, "resolved": "PIECEWISE", "attention_backends": ["XFORMERS"]}
    set_up(session, cuda_graphs=resolved)
    captured(session, [piecewise(8)])
    ran(session, piecewise(8), 5)
    said = charts_of(session)["executions"].words
    assert (
        "FULL_AND_PIECEWISE was asked for, and resolved to PIECEWISE by the attention backend "
        "(XFORMERS)."
    ) in said


def test_what_is_not_known_is_not_unused(session: SessionBuilder) -> None:
    set_up(session, memory={"worker": 0, "total_bytes": 80 * GIB, "kv_bytes": 50 * GIB})
    figure = charts_of(session)["start-up"].figure
    assert isinstance(figure, chart.Bars)
    assert [(one.name, one.values) for one in figure.segments] == [("KV cache", [50 * GIB])]
    set_up(session, memory={"worker": 0})
    found = charts_of(session)["start-up"]
    assert (found.figure, found.words) == (None, "The workers did not report all of it.")


def test_many_workers_and_gpus(session: SessionBuilder) -> None:
    """Those with the least are drawn, in the order of their numbers."""
    workers: list[dict[str, Any]] = [
        {"worker": rank, "kv_bytes": (100 - rank) * GIB} for rank in range(20)
    ]
    set_up(session, memory={**workers[19], "workers": workers})
    session.rows(
        "gpu_memory.csv",
        *(
            {"gpu": gpu, "used_bytes": gpu * GIB, "free_bytes": (80 - gpu) * GIB}
            | {"utilization_pct": ""}
            for gpu in range(10)
        ),
    )
    charts = charts_of(session)
    start_up, used = charts["start-up"], charts["used-memory"]
    assert isinstance(start_up.figure, chart.Bars)
    assert start_up.figure.labels == [f"worker {rank}" for rank in range(4, 20)]
    assert "4 more workers had more." in start_up.words
    assert isinstance(used.figure, dict)
    # Nothing says how busy they were: no line, and no empty panel.
    assert [trace["name"] for trace in used.figure["data"]] == [
        f"GPU {gpu}" for gpu in range(2, 10)
    ]
    assert len({str(trace["line"]) for trace in used.figure["data"]}) == 8
    assert "yaxis2" not in used.figure["layout"]
    assert "2 more GPUs had more free." in used.words


def test_why_nothing_was_sampled(session: SessionBuilder) -> None:
    problem = "nvidia-ml-py is not installed"
    set_up(session, gpu_memory={"interval_sec": 1, "problem": problem})
    assert charts_of(session)["used-memory"].words == f"Not sampled: {problem}."
    session.rows("gpu_memory.csv", {"used_bytes": GIB, "free_bytes": GIB})
    assert f"Not all was sampled: {problem}." in charts_of(session)["used-memory"].words


MARKUP = '<a href="https://example.org">x</a> <b>b</b> &amp; <img src=x onerror="hacked = 1">'
"""Plotly would draw a part of it as markup."""


def test_text_of_the_session_stays_text(opened: Opened, session: SessionBuilder) -> None:
    set_up(
        session,
        cuda_graphs={**SETUP, "asked": HOSTILE, "resolved": "x", "attention_backends": [HOSTILE]},
        gpus=[{"gpu": 0, "name": MARKUP, "workers": [0]}],
        gpu_memory={"interval_sec": 1, "problem": HOSTILE},
    )
    graph = full(8) | {"runtime_mode": MARKUP}
    captured(session, [graph], source=HOSTILE, part=HOSTILE)
    ran(session, graph, 5, 3)
    session.rows("gpu_memory.csv", {"used_bytes": GIB, "free_bytes": GIB})
    path = made(session.folder)
    page = opened(path)
    for key, name in (
        ("executions", MARKUP),
        ("batch-sizes", MARKUP),
        ("used-memory", f"GPU 0 ({MARKUP})"),
    ):
        assert page.locator(f"#{key} .legendtext").first.text_content() == name
    page.locator("#batch-sizes .plot").scroll_into_view_if_needed()
    page.locator("#batch-sizes .trace.bars .point path").first.hover(force=True)
    page.wait_for_selector("#batch-sizes .hoverlayer text")
    assert MARKUP in (page.text_content("#batch-sizes .hoverlayer") or "")
    assert page.query_selector_all("main img, .plot a, a[href^=http]") == []
    assert page.evaluate("window.hacked") is None
    assert path.stat().st_size < 6 * MEGABYTE
