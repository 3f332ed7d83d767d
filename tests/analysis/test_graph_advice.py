# SPDX-License-Identifier: Apache-2.0
"""Advice on CUDA graphs and their memory where it is due, and none where it is not."""

from __future__ import annotations

from typing import Any

import pytest

from analysis.summary import Effect
from tests.analysis.builder import METADATA, SessionBuilder
from tests.analysis.graphs import (
    GIB,
    MIB,
    SETUP,
    captured,
    eager,
    full,
    piecewise,
    ran,
    set_up,
)
from tests.analysis.test_advice import advice
from tests.analysis.test_capture_sizes import busiest
from tests.analysis.test_memory import GROUPS, RITUAL
from tests.analysis.test_text import one_line, text_of

FLAGS = [
    *("cudagraph-capture-sizes", "max-cudagraph-capture-size", "compilation-config"),
    "gpu-memory-utilization",
]


def served_well(session: SessionBuilder) -> None:
    set_up(session, settings=FLAGS)
    captured(session, [piecewise(8), full(8), full(4)])
    ran(session, full(8), 8, 30)
    ran(session, full(4), 4, 30)


def test_graphs_that_serve_well_need_none(session: SessionBuilder) -> None:
    served_well(session)
    assert advice(session) == {}


class TestTurnedOff:
    def off(
        self, session: SessionBuilder, tokens: int, times: int = 20, device: str = "cuda"
    ) -> None:
        off = {**SETUP, "asked": "NONE", "resolved": "NONE"}
        set_up(session, cuda_graphs=off, device=device)
        ran(session, eager(tokens), tokens, times)

    def test_take_out_enforce_eager(self, session: SessionBuilder) -> None:
        self.off(session, 12)
        piece = advice(session)["CUDA graphs"]
        assert "--enforce-eager" in piece.says
        assert (piece.flag, piece.confidence) == (None, "medium")
        assert (
            "20 executions launched every kernel one by one; half of them had at most 12"
            in (piece.evidence[0])
        )

    def test_with_large_batches_it_is_less_sure(self, session: SessionBuilder) -> None:
        self.off(session, 4000)
        assert advice(session)["CUDA graphs"].confidence == "medium"

    def test_where_there_are_none_nothing_is_to_be_turned_on(self, session: SessionBuilder) -> None:
        self.off(session, 12, device="cpu")
        assert advice(session) == {}

    def test_a_handful_says_nothing(self, session: SessionBuilder) -> None:
        self.off(session, 12, 9)
        assert advice(session) == {}


class TestDecodesWithoutFullGraphs:
    def test_the_size_to_add(self, session: SessionBuilder) -> None:
        busiest(session)
        set_up(
            session,
            scheduler={"max_num_seqs": 100, "max_num_batched_tokens": 2048},
            settings=FLAGS,
        )
        piece = advice(session)["capture sizes"]
        assert piece.says.endswith("add the size 100.")
        assert (piece.flag, piece.value) == ("--cudagraph-capture-sizes", "88 96 100 104")
        assert piece.evidence[0] == (
            "40 executions of 97 to 100 tokens ran in PIECEWISE graphs; 38 steps had decodes alone"
        )
        assert (piece.known, piece.confidence) == ("modelled", "high")
        assert piece.effects == (Effect("without_full_graph", 40, 0),)

    @pytest.mark.parametrize(
        ("settings", "flag", "value"),
        [
            (
                ["compilation-config"],
                "--compilation-config",
                "'{\"cudagraph_capture_sizes\": [88, 96, 100, 104]}'",
            ),
            (["max-num-seqs"], None, None),
        ],
    )
    def test_by_what_the_release_has(
        self, session: SessionBuilder, settings: list[str], flag: str | None, value: str | None
    ) -> None:
        busiest(session)
        scheduler = {"max_num_seqs": 100, "max_num_batched_tokens": 2048}
        set_up(session, scheduler=scheduler, settings=settings)
        piece = advice(session)["capture sizes"]
        assert (piece.flag, piece.value) == (flag, value)

    def test_a_wide_gap_takes_more_than_one_size(self, session: SessionBuilder) -> None:
        set_up(session, scheduler={"max_num_seqs": 64}, settings=FLAGS)
        captured(session, [full(8), full(4)])
        ran(session, full(8), 8, 50)
        ran(session, eager(20), 20, 30)
        ran(session, eager(60), 60, 30)
        piece = advice(session)["capture sizes"]
        assert piece.says.endswith("larger batches of decodes, of up to 64 tokens.")
        # As many sizes as now: 20 and 60 would leave out nothing, and 8 fit 20.
        assert piece.value == "20 60"


class TestLargerGraphs:
    def test_batches_of_prompts(self, session: SessionBuilder) -> None:
        set_up(
            session,
            settings=FLAGS,
            scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 2048},
        )
        captured(session, [piecewise(64), full(8)])
        ran(session, full(8), 8, 80)
        ran(session, eager(500), 500, 15)
        ran(session, eager(2000), 2000, 5)
        piece = advice(session)["capture sizes"]
        # 95 of 100 have at most 500, in steps of 16.
        assert (piece.flag, piece.value) == ("--max-cudagraph-capture-size", "512")
        assert (piece.known, piece.confidence) == ("estimated", "low")
        assert piece.evidence[0].startswith("80.00 % of executions")

    def test_prompts_that_are_too_large_for_any_default(self, session: SessionBuilder) -> None:
        set_up(session, settings=FLAGS, scheduler={"max_num_batched_tokens": 8192})
        captured(session, [piecewise(64), full(8)])
        ran(session, full(8), 8, 80)
        ran(session, eager(4000), 4000, 20)
        assert advice(session) == {}

    def test_enough_is_covered(self, session: SessionBuilder) -> None:
        set_up(session, settings=FLAGS, scheduler={"max_num_batched_tokens": 2048})
        captured(session, [full(8)])
        ran(session, full(8), 8, 90)
        ran(session, eager(500), 500, 10)
        assert advice(session) == {}

    def test_eager_for_another_reason_is_nothing_that_a_size_helps(
        self, session: SessionBuilder
    ) -> None:
        set_up(session, settings=FLAGS)
        captured(session, [full(8)])
        ran(session, full(8), 8, 20)
        ran(session, eager(5), 5, 80)
        assert advice(session) == {}


class TestPadding:
    def test_sizes_that_the_batches_have(self, session: SessionBuilder) -> None:
        set_up(session, settings=FLAGS, scheduler={"max_num_seqs": 32})
        captured(session, [full(32), full(16), full(8)])
        ran(session, full(16), 9, 20)
        ran(session, full(32), 20, 20)
        piece = advice(session)["capture sizes"]
        # 20 x 7 and 20 x 12 of 20 x 16 and 20 x 32.
        assert piece.evidence == (
            "39.58 % of what graphs computed was padding: 380 tokens, with 3 sizes",
            "2 sizes would have padded 0 tokens",
        )
        assert (piece.flag, piece.value) == ("--cudagraph-capture-sizes", "9 20")
        assert piece.known == "modelled"
        assert piece.effects == (
            Effect("graph_share", 1.0, 1.0),
            Effect("padding_share", 380 / 960, 0.0),
        )


class TestUnused:
    def unused(
        self, session: SessionBuilder, seconds: float, memory: int = 0, executions: int = 1_000
    ) -> None:
        set_up(session, settings=FLAGS, groups=GROUPS, cache={**METADATA["cache"], "blocks": 1000})
        captured(
            session,
            [
                full(size) | {"duration_sec": seconds, "memory_bytes": memory if size < 6 else 0}
                for size in range(8, 0, -1)
            ],
        )
        ran(session, full(6), 6, executions)

    @pytest.mark.parametrize(("seconds", "memory"), [(1, 0), (0.01, 5 * MIB)])
    def test_fewer_sizes(self, session: SessionBuilder, seconds: float, memory: int) -> None:
        self.unused(session, seconds, memory)
        piece = advice(session)["capture sizes"]
        assert (piece.flag, piece.value) == ("--cudagraph-capture-sizes", "6 8")
        assert (piece.known, piece.effects[1]) == ("modelled", Effect("padding_share", 0.0, 0.0))
        assert piece.evidence[0].startswith("7 of 8 graphs were never replayed; capturing them")
        assert ("up to 12 KV blocks" in piece.expect) is bool(memory)

    def test_a_few_executions_do_not_show_what_is_unneeded(self, session: SessionBuilder) -> None:
        self.unused(session, 1, executions=999)
        assert advice(session) == {}

    def test_what_costs_little_may_stay(self, session: SessionBuilder) -> None:
        self.unused(session, 0.01, MIB // 2)
        assert advice(session) == {}


class TestMemory:
    def start_up(self, session: SessionBuilder, free: int, held: int = 60, **memory: Any) -> None:
        ritual = {**RITUAL, **memory}
        set_up(
            session,
            settings=FLAGS,
            groups=GROUPS,
            memory={**ritual, "workers": [ritual]},
            gpus=[{"gpu": 0, "workers": [0], "total_bytes": 80 * GIB}],
        )
        session.usage((0, 30), (9, held))
        captured(session, [full(8)])
        session.rows("gpu_memory.csv", {"used_bytes": 80 * GIB - free, "free_bytes": free})

    def test_more_was_reserved_than_taken(self, session: SessionBuilder) -> None:
        # 1.5 of 80 GiB, beyond 0.9.
        self.start_up(session, 6 * GIB, graphs_bytes=GIB // 2, graphs_estimated_bytes=2 * GIB)
        piece = advice(session)["pool"]
        assert (piece.flag, piece.value) == ("--gpu-memory-utilization", "0.9187")
        assert piece.expect.startswith("768 KV blocks more")

    @pytest.mark.parametrize(
        ("free", "memory"),
        [
            # Not far off; not applied; no room on the GPU.
            (6 * GIB, {"graphs_bytes": GIB}),
            (6 * GIB, {"graphs_bytes": GIB // 2, "graphs_estimate_applied": False}),
            (GIB, {"graphs_bytes": GIB // 2}),
        ],
    )
    def test_nothing_to_give_back(
        self, session: SessionBuilder, free: int, memory: dict[str, Any]
    ) -> None:
        self.start_up(session, free, **memory)
        assert advice(session) == {}

    def test_a_pool_that_is_large_enough_needs_no_more(self, session: SessionBuilder) -> None:
        self.start_up(session, 6 * GIB, held=39, graphs_bytes=GIB // 2)
        assert advice(session) == {}

    def test_less_was_reserved_and_the_gpu_is_full(self, session: SessionBuilder) -> None:
        # 4 GiB taken, none reserved: 4 of 80 GiB less.
        memory = {"graphs_bytes": 4 * GIB, "graphs_estimate_applied": False}
        self.start_up(session, GIB // 2, **memory)
        piece = advice(session)["pool"]
        assert (piece.flag, piece.value) == ("--gpu-memory-utilization", "0.8500")
        assert piece.evidence[1] == "at the peak 512.0 MiB of the GPU's memory were free"

    def test_less_was_reserved_and_there_is_room(self, session: SessionBuilder) -> None:
        self.start_up(session, 4 * GIB, graphs_bytes=4 * GIB, graphs_estimate_applied=False)
        assert advice(session) == {}


def test_long_values_are_wrapped(session: SessionBuilder) -> None:
    set_up(session, settings=FLAGS, scheduler={"max_num_seqs": 512, "max_num_batched_tokens": 2048})
    captured(session, [full(size) for size in range(512, 0, -8)])
    for size in range(8, 513, 8):
        ran(session, full(size), size - 7, 60 if size <= 64 else 1)
    text = text_of(session)
    # The session's folder is a line of its own.
    assert max(map(len, text.splitlines()[2:])) <= 80
    assert "--cudagraph-capture-sizes 1 9 17 25 33" in one_line(text)
