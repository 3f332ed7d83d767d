# SPDX-License-Identifier: Apache-2.0
"""What graphs cost and gave, with figures worked out by hand."""

from __future__ import annotations

from analysis import open_session, summarize
from analysis.gpu.graph_ledger import Estimate, Graph, Ledger, Total
from tests.analysis.builder import SessionBuilder
from tests.analysis.graphs import (
    GIB,
    MIB,
    captured,
    full,
    mixed,
    piecewise,
    ran,
    replayed,
    set_up,
)
from tests.analysis.test_text import one_line, text_of

GROUPS = [{"kind": "FullAttentionSpec", "block_size": 16, "bytes_per_block": 2 * MIB}]


def ledger_of(session: SessionBuilder, after_sec: float = 0) -> Ledger:
    found = summarize(open_session(session.folder, after_sec=after_sec)).graph_ledger
    assert found is not None
    return found


def by_name(ledger: Ledger) -> dict[tuple[str | None, int | None], Graph]:
    return {(graph.mode, graph.num_tokens): graph for graph in ledger.graphs}


class TestGraphs:
    def test_what_each_cost_and_gave(self, session: SessionBuilder) -> None:
        mixed(session)
        graphs = by_name(ledger_of(session))
        assert len(graphs) == 8
        four = graphs["FULL", 4]
        assert (four.memory_bytes, four.capture_sec, four.cuda_graphs) == (2 * MIB, 0.25, 1)
        assert (four.replays, four.dummy_replays, four.tokens, four.padding) == (10, 5, 30, 10)
        assert round(four.launch_us or 0, 6) == 10
        assert (four.uniform, four.has_lora, four.num_reqs, four.workers) == (True, False, 4, 1)
        pieces = graphs["PIECEWISE", 8]
        assert (pieces.cuda_graphs, pieces.replays, pieces.tokens) == (3, 2, 10)
        assert (pieces.uniform, pieces.num_reqs, pieces.pays_for_pool) == (False, None, True)
        pays = [graph.mode for graph in graphs.values() if graph.pays_for_pool]
        assert sorted(pays) == ["FULL", "PIECEWISE"]

    def test_the_most_replayed_come_first(self, session: SessionBuilder) -> None:
        mixed(session)
        names = [(graph.mode, graph.num_tokens) for graph in ledger_of(session).graphs]
        assert names[:4] == [("FULL", 4), ("FULL", 8), ("PIECEWISE", 8), ("FULL", 1)]

    def test_totals(self, session: SessionBuilder) -> None:
        mixed(session)
        ledger = ledger_of(session)
        assert ledger.total == Total(0, 8, 4 + 12, 106 * MIB, 2.0)
        full_, pieces = ledger.by_mode
        assert (full_.mode, full_.total, full_.replays) == (
            "FULL",
            Total(0, 4, 4, 36 * MIB, 1.0),
            16,
        )
        assert (pieces.total, pieces.replays) == (Total(0, 4, 12, 70 * MIB, 1.0), 2)

    def test_it_is_about_the_whole_session(self, session: SessionBuilder) -> None:
        mixed(session)
        session.usage((0, 10), (9, 10))
        assert by_name(ledger_of(session, after_sec=5))["FULL", 4].tokens == 30

    def test_workers_capture_side_by_side(self, session: SessionBuilder) -> None:
        set_up(session)
        captured(session, [full(8) | {"memory_bytes": 10, "duration_sec": 2}])
        captured(session, [full(8) | {"memory_bytes": 30, "duration_sec": 1}], worker=1)
        replayed(session, full(8), 3)
        replayed(session, full(8), 4, worker=1)
        ledger = ledger_of(session)
        (graph,) = ledger.graphs
        assert (graph.workers, graph.memory_bytes, graph.capture_sec, graph.replays) == (
            2,
            30,
            2,
            7,
        )
        assert ledger.total == Total(1, 1, 1, 30, 1.0)

    def test_captured_again_it_is_what_it_is_now(self, session: SessionBuilder) -> None:
        set_up(session)
        captured(session, [full(8) | {"memory_bytes": 50}, full(8) | {"memory_bytes": 20}])
        replayed(session, full(8), 3, capture_time_sec=1)
        replayed(session, full(8), 0, capture_time_sec=1.5)
        ledger = ledger_of(session)
        (graph,) = ledger.graphs
        assert (graph.captures, graph.memory_bytes, graph.capture_sec) == (2, 20, 0.5)
        assert (graph.replays, ledger.unused.never.graphs) == (3, 0)

    def test_a_drafter_s_graphs_have_no_batches_in_the_timeline(
        self, session: SessionBuilder
    ) -> None:
        set_up(session)
        captured(session, [full(8)])
        captured(session, [full(8)], part="drafter")
        ran(session, full(8), 6, 4)
        replayed(session, full(8), 9, part="drafter")
        drafter, model = ledger_of(session).graphs
        assert (drafter.part, drafter.replays, drafter.tokens) == ("drafter", 9, None)
        assert (model.part, model.replays, model.tokens, model.padding) == ("model", 4, 24, 8)
        text = one_line(text_of(session))
        assert "FULL 8 drafter 9" in text
        assert "FULL 8 4 24 25.00 % 0 B 250.0 ms" in text

    def test_without_a_graph_there_is_none(self, session: SessionBuilder) -> None:
        assert summarize(open_session(session.folder)).graph_ledger is None


class TestUnused:
    """Situation 29: 67 graphs captured, a handful used: seconds and MiB."""

    def test_never_replayed_and_in_dummies_alone(self, session: SessionBuilder) -> None:
        mixed(session)
        unused = ledger_of(session).unused
        # FULL 2, and PIECEWISE 4, 2 and 1.
        assert unused.never == Total(0, 4, 1 + 9, (2 + 4 + 2) * MIB, 1.0)
        assert unused.dummy_only == Total(0, 1, 1, 0, 0.25)

    def test_a_handful_of_67(self, session: SessionBuilder) -> None:
        set_up(session, groups=GROUPS)
        sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
        modes = [piecewise(size) for size in sizes], [full(size) for size in sizes[:16]]
        graphs = [*reversed(modes[0]), *reversed(modes[1])]
        assert len(graphs) == 67
        first, *others = (graph | {"duration_sec": 0.5} for graph in graphs)
        captured(
            session,
            [
                first | {"memory_bytes": 400 * MIB},
                *({**g, "memory_bytes": 3 * MIB} for g in others),
            ],
        )
        used = [full(1), full(2), full(4), piecewise(256)]
        for graph in used:
            ran(session, graph, graph["num_tokens"], 5)
        ledger = ledger_of(session)
        # All but the four, among them the first of each mode, which pay for the pool.
        assert ledger.unused.never == Total(0, 63, 63, (400 + 62 * 3) * MIB, 31.5)
        assert ledger.unused.more_blocks == 61 * 3 // 2
        assert ledger.unused.more_blocks_most == (400 + 62 * 3) // 2
        text = one_line(text_of(session))
        assert "Never replayed 63 graphs 586.0 MiB and 31.50 s on worker 0" in text
        assert "Without these 91 KV blocks more up to 293 if the graphs captured first" in text
        assert "estimate" not in text
        section = text_of(session).partition("The graph ledger\n")[2].partition("\n\n")[0]
        assert len(section.splitlines()) < 20

    def test_a_graph_that_another_worker_uses_is_used(self, session: SessionBuilder) -> None:
        set_up(session)
        for worker in (0, 1):
            captured(session, [full(8), full(4)], worker=worker)
        replayed(session, full(8), 0)
        replayed(session, full(8), 3, worker=1)
        unused = ledger_of(session).unused.never
        assert (unused.graphs, unused.worker) == (1, 0)


class TestEstimate:
    """Situation 30: graph memory estimated, measured, and counted twice."""

    def estimated(self, session: SessionBuilder, **memory: object) -> Estimate | None:
        facts = {"worker": 0, "kv_bytes": 10 * GIB, "total_bytes": 80 * GIB, **memory}
        set_up(session, groups=GROUPS, memory={**facts, "workers": [facts]})
        captured(session, [full(8) | {"memory_bytes": 100 * MIB}, full(4)])
        captured(session, [full(8) | {"memory_bytes": 900 * MIB}], kind="profiling")
        return ledger_of(session).estimate

    def test_too_much_was_reserved(self, session: SessionBuilder) -> None:
        found = self.estimated(
            session,
            graphs_estimated_bytes=600 * MIB,
            graphs_bytes=120 * MIB,
            graphs_estimate_applied=True,
        )
        assert found == Estimate(0, 600 * MIB, True, 120 * MIB, 100 * MIB, 5.0, 240)
        text = one_line(text_of(session))
        assert (
            "Graph memory 600.0 MiB reserved by estimate, 120.0 MiB found by vLLM, "
            "100.0 MiB sum of the captures 5.00 times what it took taken off the KV cache: "
            "240 blocks too few"
        ) in text

    def test_too_little_was(self, session: SessionBuilder) -> None:
        found = self.estimated(
            session,
            graphs_estimated_bytes=20 * MIB,
            graphs_bytes=121 * MIB,
            graphs_estimate_applied=True,
        )
        assert found is not None
        # A part of a block is none.
        assert (round(found.ratio or 0, 3), found.blocks) == (0.165, -50)
        assert "50 blocks more than there was memory for" in one_line(text_of(session))

    def test_an_estimate_that_was_not_applied_took_no_block(self, session: SessionBuilder) -> None:
        found = self.estimated(
            session,
            graphs_estimated_bytes=600 * MIB,
            graphs_bytes=120 * MIB,
            graphs_estimate_applied=False,
        )
        assert found is not None
        assert (found.ratio, found.blocks) == (5.0, None)
        text = one_line(text_of(session))
        assert "5.00 times what it took not taken off the KV cache" in text
        assert "Without these 0 KV blocks more up to 50 if the graphs captured first" in text
        assert "no estimate was taken off the KV cache: it gets them if it asks for more" in text

    def test_what_vllm_did_not_measure_the_captures_say(self, session: SessionBuilder) -> None:
        found = self.estimated(session, graphs_estimated_bytes=50 * MIB)
        assert found is not None
        assert (found.measured_bytes, found.captured_bytes, found.ratio) == (None, 100 * MIB, 0.5)

    def test_profiling_captures_are_not_unused(self, session: SessionBuilder) -> None:
        self.estimated(session)
        ledger = ledger_of(session)
        assert (ledger.total.graphs, ledger.unused.never.graphs) == (2, 2)
        assert ledger.profiling == Total(0, 1, 1, 900 * MIB, 0.25)
        assert "Trial captures 1 graph 900.0 MiB and 250.0 ms on worker 0; to" in (
            one_line(text_of(session))
        )
