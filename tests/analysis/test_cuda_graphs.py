# SPDX-License-Identifier: Apache-2.0
"""Coverage, modes, padding, and why executions were eager, with figures worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import compare, open_session, summarize
from analysis.gpu.cuda_graphs import Batch, CudaGraphs, PaddedBatch
from tests.analysis.builder import METADATA, SessionBuilder
from tests.analysis.graphs import (
    SETUP,
    WORKER,
    captured,
    eager,
    full,
    mixed,
    piecewise,
    ran,
    replayed,
    set_up,
)
from tests.analysis.test_session import error_of
from tests.analysis.test_text import one_line, text_of


def graphs_of(session: SessionBuilder, **window: Any) -> CudaGraphs:
    return summarize(open_session(session.folder, **window)).cuda_graphs


def reasons(session: SessionBuilder) -> dict[str, int]:
    return {part.reason: part.executions for part in graphs_of(session).eager}


class TestCoverage:
    def test_of_executions_and_of_unpadded_tokens(self, session: SessionBuilder) -> None:
        mixed(session)
        found = graphs_of(session)
        assert found.absent is None
        assert (found.executions, found.dummy_executions, found.tokens) == (20, 12, 128)
        assert (found.in_graphs, found.execution_share) == (18, 0.9)
        assert (found.tokens_in_graphs, found.token_share) == (88, 88 / 128)

    def test_by_mode(self, session: SessionBuilder) -> None:
        mixed(session)
        full_, pieces, none = graphs_of(session).by_mode
        assert (full_.mode, full_.executions, full_.tokens, full_.padding) == ("FULL", 16, 78, 10)
        assert full_.launch_us == (10 * 20 + 6 * 40) / 16
        assert full_.gpu_us is None
        assert (pieces.mode, pieces.execution_share, pieces.padding) == ("PIECEWISE", 0.1, 6)
        assert (none.mode, none.executions, none.token_share) == ("NONE", 2, 40 / 128)
        assert none.launch_us is None

    def test_time_on_the_gpu_is_that_of_what_was_timed(self, session: SessionBuilder) -> None:
        set_up(session)
        ran(session, full(4), 4, 2, gpu_us=30)
        ran(session, full(4), 4, 1, gpu_us=60)
        ran(session, full(4), 4, 5)
        assert graphs_of(session).by_mode[0].gpu_us == 40

    def test_warm_up_is_left_out(self, session: SessionBuilder) -> None:
        set_up(session)
        captured(session, [full(4)])
        ran(session, eager(20), 20, 9, timestamp_sec=2)
        ran(session, full(4), 4, 3, timestamp_sec=6)
        found = graphs_of(session, after_sec=5)
        assert (found.executions, found.execution_share, found.eager) == (3, 1.0, ())
        assert graphs_of(session).executions == 12

    def test_workers_apart(self, session: SessionBuilder) -> None:
        set_up(session)
        captured(session, [full(4)])
        captured(session, [full(4)], worker=1)
        ran(session, full(4), 4, 3)
        ran(session, full(4), 2, 1, worker=1)
        ran(session, eager(6), 6, 1, worker=1)
        first, second = graphs_of(session).by_worker
        assert (first.worker, first.executions, first.execution_share) == (0, 3, 1.0)
        assert (second.worker, second.execution_share, second.token_share) == (1, 0.5, 0.25)
        assert (first.padding_share, second.padding_share) == (0, 0.5)
        assert "Worker 1 2 50.00 % 25.00 % 50.00 %" in one_line(text_of(session))


class TestEager:
    def test_larger_than_the_largest_graph(self, session: SessionBuilder) -> None:
        set_up(session)
        captured(session, [piecewise(8), full(8)])
        for tokens, times in ((9, 3), (30, 5), (64, 1)):
            ran(session, eager(tokens), tokens, times)
        (part,) = graphs_of(session).eager
        assert (part.reason, part.executions, part.tokens) == ("too_large", 9, 27 + 150 + 64)
        assert (part.smallest_tokens, part.p50_tokens, part.largest_tokens) == (9, 30, 64)
        assert part.most == (Batch(30, 5), Batch(9, 3), Batch(64, 1))

    def test_one_of_the_largest_size_is_not_larger(self, session: SessionBuilder) -> None:
        set_up(session)
        captured(session, [full(8)])
        ran(session, eager(8), 8)
        assert reasons(session) == {"other": 1}

    def test_each_worker_has_its_own_largest(self, session: SessionBuilder) -> None:
        set_up(session)
        captured(session, [full(8)])
        captured(session, [full(16)], worker=1)
        ran(session, eager(12), 12)
        ran(session, eager(12), 12, 2, worker=1)
        assert reasons(session) == {"other": 2, "too_large": 1}

    def test_none_captured(self, session: SessionBuilder) -> None:
        set_up(session)
        captured(session, [full(8)], kind="profiling")
        ran(session, eager(4), 4)
        assert reasons(session) == {"not_captured": 1}

    @pytest.mark.parametrize(
        ("asked", "resolved", "reason"),
        [
            ("NONE", "NONE", "asked_none"),
            ("FULL", "NONE", "resolved_none"),
            ("FULL_DECODE_ONLY", "FULL_DECODE_ONLY", "decode_only"),
            ("FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE", "other"),
            ("FULL_AND_PIECEWISE", None, "other"),
        ],
    )
    def test_by_mode(
        self, session: SessionBuilder, asked: str, resolved: str | None, reason: str
    ) -> None:
        set_up(session, cuda_graphs={**SETUP, "asked": asked, "resolved": resolved})
        captured(session, [full(8)])
        ran(session, eager(4), 4, 2)
        assert reasons(session) == {reason: 2}

    def test_sent_to_a_graph_and_none_replayed(self, session: SessionBuilder) -> None:
        set_up(session)
        captured(session, [full(8)])
        ran(session, full(8), 7, 2, num_graphs=0)
        ran(session, full(8), 8, 2)
        found = graphs_of(session)
        assert {part.reason: part.executions for part in found.eager} == {"not_replayed": 2}
        # What no graph computed has no padding.
        assert (found.execution_share, found.padding.tokens) == (0.5, 0)

    def test_without_a_table_of_captures_the_configured_largest_counts(
        self, session: SessionBuilder
    ) -> None:
        set_up(session)
        ran(session, full(8), 8)
        ran(session, eager(9), 9)
        ran(session, eager(3), 3)
        assert reasons(session) == {"other": 1, "too_large": 1}


class TestPadding:
    def test_in_all_and_by_size(self, session: SessionBuilder) -> None:
        mixed(session)
        padding = graphs_of(session).padding
        assert (padding.tokens, padding.share) == (16, 16 / 104)
        four, eight = padding.by_size
        assert (four.size, four.executions, four.full, four.piecewise) == (4, 10, 10, 0)
        assert (four.tokens, four.padding, four.share) == (30, 10, 0.25)
        assert (eight.size, eight.executions, eight.full, eight.piecewise) == (8, 8, 6, 2)
        assert (eight.tokens, eight.padding, eight.share) == (58, 6, 6 / 64)

    def test_batches_that_pay_most(self, session: SessionBuilder) -> None:
        mixed(session)
        worst = graphs_of(session).padding.worst
        assert worst == (PaddedBatch(3, 4, 10, 10), PaddedBatch(5, 8, 2, 6))

    def test_the_lists_stay_short(self, session: SessionBuilder) -> None:
        set_up(session)
        for size in range(2, 66):
            ran(session, full(size), size - 1)
        assert len(graphs_of(session).padding.worst) == 5
        assert text_of(session).count("Padded to") == 8


class TestThreeColumns:
    """Situation 28: asked for FULL, resolved by the attention backend, and what ran."""

    def test_asked_resolved_and_ran(self, session: SessionBuilder) -> None:
        setup = {**SETUP, "asked": "FULL", "resolved": "PIECEWISE", "attention_backends": ["FLEX"]}
        set_up(session, cuda_graphs=setup)
        captured(session, [piecewise(8)])
        ran(session, piecewise(8), 8, 3)
        ran(session, eager(40), 40, 1)
        found = graphs_of(session)
        assert (found.setup.asked, found.setup.resolved) == ("FULL", "PIECEWISE")
        assert found.setup.attention_backends == ("FLEX",)
        assert [use.mode for use in found.by_mode] == ["PIECEWISE", "NONE"]
        text = one_line(text_of(session))
        assert "asked for resolved to what ran FULL PIECEWISE PIECEWISE 75.00 % NONE 25.00 %" in (
            text
        )
        assert "Resolved by FLEX (attention), model runner V2" in text


class TestNothing:
    @pytest.mark.parametrize(
        ("metadata", "says"),
        [
            ({}, "Not recorded: this session does not say on which device it ran."),
            ({"device": "cpu"}, "There are none: the engine ran on the CPU."),
            ({"device": "xpu"}, "There are none: the engine ran on 'xpu'."),
            ({"device": "cuda"}, "Not recorded: no worker process recorded anything."),
            (
                {"device": "cuda", "cuda_graphs": {**SETUP, "asked": "NONE"}},
                "None were asked for (--enforce-eager, or cudagraph_mode NONE), and nothing ran.",
            ),
            (
                {
                    "device": "cuda",
                    "processes": [{**WORKER, "hooks_missing": {"cuda_graph": "no torch"}}],
                },
                "Not recorded: a hook could not be attached (worker 0: cuda_graph: no torch).",
            ),
            (
                {"device": "cuda", "processes": [WORKER], "cuda_graphs": SETUP},
                "Nothing was captured or executed.",
            ),
            ({"device": 7, "cuda_graphs": [], "processes": 3}, "Not recorded: this session does"),
        ],
    )
    def test_says_why(self, session: SessionBuilder, metadata: dict[str, Any], says: str) -> None:
        session.metadata(**metadata)
        found = graphs_of(session)
        assert found.absent is not None
        assert found.absent.startswith(says)
        section = text_of(session).partition("\nCUDA graphs\n")[2].partition("\n\n")[0]
        assert one_line(section).startswith(says)
        assert (found.executions, found.execution_share, found.padding.share) == (0, None, None)

    def test_captured_and_nothing_executed_yet(self, session: SessionBuilder) -> None:
        set_up(session)
        captured(session, [full(8), full(4)])
        ran(session, full(8), 8, 3, dummy=1)
        found = graphs_of(session)
        assert found.absent == (
            "Nothing was executed for a request: graphs were captured, and none has served one."
        )
        assert found.dummy_executions == 3

    def test_a_damaged_setup_is_not_known(self, session: SessionBuilder) -> None:
        damaged = {"asked": 3, "capture_sizes": [8, "x", -1, True], "max_capture_size": "many"}
        session.metadata(cuda_graphs={**damaged, "attention_backends": "FLASH"})
        setup = graphs_of(session).setup
        assert (setup.asked, setup.capture_sizes, setup.max_capture_size) == (None, (8,), None)
        assert setup.attention_backends == ()


class TestDamage:
    TIMELINE = "cuda_graph_timeline.csv"

    def test_a_line_that_is_cut_short(self, session: SessionBuilder) -> None:
        mixed(session)
        session.append(self.TIMELINE, "3,FULL,8\n")
        assert f"{self.TIMELINE}, line 34: 3 fields instead of 12" in error_of(session)

    def test_a_number_out_of_range(self, session: SessionBuilder) -> None:
        set_up(session)
        ran(session, full(8), -1)
        assert "unpadded_tokens is '-1', which is out of range" in error_of(session)

    def test_a_table_that_is_another(self, session: SessionBuilder) -> None:
        set_up(session)
        session.append("cuda_graph_usage.csv", "a,b\n1,2\n")
        assert "cuda_graph_usage.csv, line 1: 'a' where column 1 is 'runtime_mode'" in (
            error_of(session)
        )

    def test_memory_may_be_large(self, session: SessionBuilder) -> None:
        set_up(session)
        captured(session, [full(8) | {"memory_bytes": 2**33}])
        ledger = summarize(open_session(session.folder)).graph_ledger
        assert ledger is not None
        assert ledger.total.memory_bytes == 2**33
        captured(session, [full(8) | {"memory_bytes": 2**51}])
        assert "memory_bytes is '2251799813685248', which is out of range" in error_of(session)

    def test_an_unfinished_line_of_a_running_session(self, session: SessionBuilder) -> None:
        set_up(session, complete=False, ended_at=None)
        ran(session, full(8), 8, 3)
        session.append(self.TIMELINE, "3,FULL,8,8,1,0,8,1")
        assert graphs_of(session).executions == 3

    def test_replays_without_a_capture(self, session: SessionBuilder) -> None:
        set_up(session)
        blank = {"runtime_mode": "", "num_tokens": "", "uniform": "", "has_lora": ""}
        replayed(session, {**blank, "source": "unknown", "part": "unknown"}, 7, capture_time_sec="")
        ledger = summarize(open_session(session.folder)).graph_ledger
        assert ledger is not None
        assert (ledger.unknown_replays, ledger.graphs) == (7, ())


def test_old_metadata_is_no_error(session: SessionBuilder) -> None:
    session.metadata(processes=METADATA["processes"])
    assert "CUDA graphs\n  Not recorded" in text_of(session)


def test_a_comparison_shows_what_was_captured(session: SessionBuilder, tmp_path: Path) -> None:
    other = SessionBuilder(tmp_path / "session_20260131_130000_4712_c0ffee")
    mixed(session)
    mixed(other)
    set_up(other, cuda_graphs={**SETUP, "capture_sizes": [1, 8]})
    found = compare(open_session(session.folder), open_session(other.folder))
    (differs,) = (row for row in found.configuration if row.name.startswith("cuda_graphs"))
    assert (differs.name, differs.values) == (
        "cuda_graphs.capture_sizes",
        ("[1, 2, 4, 8]", "[1, 8]"),
    )
    (coverage,) = (row for row in found.measures if row.name == "graph_coverage")
    assert coverage.values == (0.9, 0.9)
