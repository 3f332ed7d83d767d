# SPDX-License-Identifier: Apache-2.0
"""Suggested capture sizes: by hand, and against every list that there is."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import open_session, summarize
from analysis.gpu import capture_sizes
from analysis.gpu.capture_sizes import CaptureSizes, DecodeGap, DecodeStepTally, Fit
from analysis.tables import facts
from analysis.tables.session import Session
from tests.analysis.builder import SessionBuilder
from tests.analysis.graphs import captured, eager, full, mixed, piecewise, ran, set_up
from tests.analysis.test_text import one_line, text_of


def sizes_of(session: SessionBuilder) -> CaptureSizes:
    found = summarize(open_session(session.folder)).capture_sizes
    assert found is not None
    return found


class TestByHand:
    def test_todays_sizes_and_better_ones(self, session: SessionBuilder) -> None:
        mixed(session)
        found = sizes_of(session)
        # 10 x 3, 6 x 8 and 2 x 5 tokens; 2 x 20 are too large. At most 8 requests of a token each.
        assert (found.executions, found.tokens) == (20, 128)
        assert (found.step, found.decode_tokens, found.largest_tokens) == (1, 8, 8)
        in_graphs = (18, 0.9, 88, 88 / 128)
        assert found.today == Fit((1, 2, 4, 8), *in_graphs, 10 + 6, 16 / 104)
        assert found.least_padding == Fit((3, 5, 8), *in_graphs, 0, 0.0)
        # Of two sizes, 3 and 8 pad 2 x 3 tokens; 5 and 8 would 10 x 2.
        assert found.fewest == Fit((3, 8), *in_graphs, 6, 6 / 94)

    def test_the_sizes_that_were_captured_are_todays(self, session: SessionBuilder) -> None:
        set_up(session)
        captured(session, [full(6), piecewise(12)])
        captured(session, [piecewise(64)], kind="profiling")
        captured(session, [full(48)], part="drafter")
        ran(session, full(6), 5)
        assert sizes_of(session).today.sizes == (6, 12)

    def test_without_captures_the_configured_ones_are(self, session: SessionBuilder) -> None:
        set_up(session)
        ran(session, full(8), 5)
        assert sizes_of(session).today.sizes == (1, 2, 4, 8)

    def test_batches_of_decodes_are_to_be_covered_and_prompts_are_not(
        self, session: SessionBuilder
    ) -> None:
        set_up(session, scheduler={"max_num_seqs": 32})
        captured(session, [full(8), full(4)])
        ran(session, full(8), 8, 5)
        ran(session, eager(30), 30, 3)
        ran(session, eager(50), 50, 2)
        found = sizes_of(session)
        assert (found.largest_tokens, found.today.execution_share) == (32, 0.5)
        assert found.least_padding is not None
        assert found.least_padding.sizes == (8, 30)
        assert found.least_padding.execution_share == 0.8
        # Nine in ten of the executions have at most 50 tokens; vLLM's sizes are 16 apart.
        assert found.for_coverage == 64

    def test_no_size_is_larger_than_a_step_may_be(self, session: SessionBuilder) -> None:
        set_up(session, scheduler={"max_num_seqs": 32, "max_num_batched_tokens": 16})
        captured(session, [full(8)])
        ran(session, full(8), 8, 5)
        ran(session, eager(12), 12, 5)
        assert sizes_of(session).largest_tokens == 16

    def test_a_shortest_list_that_reaches_todays_padding(self, session: SessionBuilder) -> None:
        set_up(session)
        captured(session, [full(size) for size in range(1, 9)])
        ran(session, full(4), 4, 9)
        ran(session, full(8), 8)
        found = sizes_of(session)
        assert (found.today.padding, found.fewest and found.fewest.sizes) == (0, (4, 8))

    @pytest.mark.parametrize("what", ["nothing", "captured", "eager"])
    def test_nothing_to_suggest(self, session: SessionBuilder, what: str) -> None:
        if what == "captured":
            set_up(session)
            captured(session, [full(8)])
        elif what == "eager":
            session.metadata(device="cuda")
            ran(session, eager(9), 9, 3)
        assert summarize(open_session(session.folder)).capture_sizes is None


def busiest(session: SessionBuilder) -> None:
    """Situation 26: 100 requests at most, and sizes 96 and 104."""
    set_up(session, scheduler={"max_num_seqs": 100, "max_num_batched_tokens": 2048})
    captured(session, [piecewise(size) for size in (104, 96, 88)])
    captured(session, [full(96), full(88)])
    ran(session, full(96), 92, 100)
    for tokens, times in ((97, 5), (100, 35)):
        ran(session, piecewise(104), tokens, times)
    # A prompt among them: no batch of decodes.
    ran(session, piecewise(104), 103, 10)
    steps = [(97, 0, 5), (100, 0, 33), (100, 60, 2), (92, 0, 100), (103, 50, 10)]
    session.rows(
        "scheduler_steps.csv",
        *(
            {
                "scheduled_tokens": tokens,
                "prefill_tokens": prefill,
                "decode_tokens": tokens - prefill,
                "scheduled_reqs": 1,
            }
            for tokens, prefill, times in steps
            for _ in range(times)
        ),
    )


class TestBusiestBatches:
    def test_the_size_to_add_is_named(self, session: SessionBuilder) -> None:
        busiest(session)
        gap = sizes_of(session).decode_gap
        assert gap == DecodeGap(
            add=100, from_tokens=97, to_tokens=100, executions=40, ran="PIECEWISE", decode_steps=38
        )
        text = one_line(text_of(session))
        assert "Size to add 100 batches of 97 to 100 tokens ran PIECEWISE (40 executions" in text

    def test_suggested_sizes_leave_no_gap(self, session: SessionBuilder) -> None:
        busiest(session)
        better = sizes_of(session).least_padding
        assert better is not None
        # Without the rule 92, 100 and 103 or 104 would pad as little; 100 must be one of them.
        assert better.sizes == (92, 100, 103)

    def test_eager_batches_are_in_a_gap_as_well(self, session: SessionBuilder) -> None:
        set_up(session, scheduler={"max_num_seqs": 16})
        captured(session, [full(8)])
        ran(session, full(8), 8)
        ran(session, eager(13), 13, 4)
        gap = sizes_of(session).decode_gap
        # One size for 9 to 16 requests would be half padding.
        assert gap == DecodeGap(None, 9, 16, 4, "NONE", None)
        assert "Without FULL graph batches of 9 to 16 tokens ran eagerly (4 executions)" in (
            one_line(text_of(session))
        )

    def test_there_is_none_where_a_size_is_max_num_seqs(self, session: SessionBuilder) -> None:
        set_up(session, scheduler={"max_num_seqs": 8})
        captured(session, [full(8), piecewise(16)])
        ran(session, piecewise(8), 8, 5)
        ran(session, piecewise(16), 12, 5)
        assert sizes_of(session).decode_gap is None

    def test_there_is_none_where_full_graphs_hold_any_batch(self, session: SessionBuilder) -> None:
        set_up(session, scheduler={"max_num_seqs": 12})
        captured(session, [full(8) | {"uniform": 0}, full(16) | {"uniform": 0}])
        ran(session, full(16) | {"uniform": 0}, 11, 5)
        assert sizes_of(session).decode_gap is None


class TestSpeculation:
    """Situation 27: sizes are tokens, batches are requests x (1 + k)."""

    def test_sizes_are_multiples_of_a_request_s_tokens(self, session: SessionBuilder) -> None:
        set_up(session, scheduler={"max_num_seqs": 5, "speculative_tokens": 3})
        captured(session, [piecewise(size) for size in (24, 16, 10, 8)])
        captured(session, [full(16, 4), full(8, 2)])
        ran(session, full(16, 4), 12, 20)
        ran(session, piecewise(24), 20, 30)
        ran(session, piecewise(10), 9, 4)
        found = sizes_of(session)
        assert (found.step, found.decode_tokens, found.off_step) == (4, 20, (10,))
        # 9 tokens fit 12, as 3 requests of 4 tokens do.
        assert found.least_padding == Fit((12, 20), 54, 1, 876, 1, 4 * 3, 12 / 888)
        assert found.decode_gap is not None
        assert (found.decode_gap.add, found.decode_gap.from_tokens) == (20, 20)
        assert found.decode_gap.executions == 30
        assert "multiples of 4" in one_line(text_of(session))

    def test_what_is_no_multiple_is_no_batch_of_decodes(self, session: SessionBuilder) -> None:
        set_up(session, scheduler={"max_num_seqs": 6, "speculative_tokens": 3})
        captured(session, [piecewise(24), full(16, 4)])
        ran(session, piecewise(24), 22, 30)
        assert sizes_of(session).decode_gap is None
        ran(session, piecewise(24), 20, 2)
        gap = sizes_of(session).decode_gap
        assert gap is not None
        assert (gap.from_tokens, gap.to_tokens, gap.executions) == (20, 24, 2)


def every_list(
    batches: list[tuple[int, int]], step: int, decode: int, largest: int, most: int
) -> dict[int, int]:
    """The least padding by the number of sizes, found by trying every list of multiples of
    ``step`` that covers all batches up to ``largest`` and in which none of at most ``decode``
    tokens, rounded up to a multiple, is padded beyond ``decode``."""
    wanted = [(tokens, times) for tokens, times in batches if tokens <= largest]
    top = max((-(-tokens // step) * step for tokens, _ in wanted), default=0)
    least: dict[int, int] = {}
    for count in range(1, most + 1):
        for sizes in combinations(range(step, top + 1, step), count):
            fits = [min((s for s in sizes if s >= tokens), default=None) for tokens, _ in wanted]
            if None in fits or any(
                -(-tokens // step) * step <= decode < (size or 0)
                for (tokens, _), size in zip(wanted, fits, strict=True)
            ):
                continue
            padding = sum(
                ((size or 0) - tokens) * times
                for (tokens, times), size in zip(wanted, fits, strict=True)
            )
            least[count] = min(padding, least.get(count, padding))
    return least


@settings(max_examples=150, deadline=None)
@given(
    counts=st.dictionaries(st.integers(1, 14), st.integers(1, 9), min_size=1, max_size=7),
    today=st.sets(st.integers(1, 14), min_size=1, max_size=4),
    step=st.integers(1, 3),
    seqs=st.integers(1, 8),
)
def test_no_list_is_better(counts: dict[int, int], today: set[int], step: int, seqs: int) -> None:
    batches = sorted(counts.items())
    sizes = sorted(today)
    found = _measured(batches, sizes, step, seqs)
    assert found is not None
    decode = seqs * step
    best = every_list(batches, step, decode, max(sizes[-1], decode), len(sizes))
    if not best:
        assert found.least_padding is None
    else:
        assert found.least_padding is not None
        assert found.least_padding.padding == min(best.values())
        fewest = min(count for count, padding in best.items() if padding == min(best.values()))
        assert len(found.least_padding.sizes) == fewest
    same = every_list(batches, step, decode, sizes[-1], len(sizes))
    enough = [count for count, padding in same.items() if padding <= found.today.padding]
    if not enough:
        assert found.fewest is None
    else:
        assert found.fewest is not None
        assert len(found.fewest.sizes) == min(enough)
        assert found.fewest.padding <= found.today.padding


@settings(max_examples=60, deadline=None)
@given(
    counts=st.dictionaries(st.integers(1, 300), st.integers(1, 500), min_size=20, max_size=60),
    most=st.integers(2, 12),
)
def test_no_list_is_better_for_many_batches(counts: dict[int, int], most: int) -> None:
    batches = sorted(counts.items())
    top = batches[-1][0]
    found = _measured(batches, [*range(1, most), top], 1, 1)
    assert found is not None
    assert found.least_padding is not None
    # Batches of one token are decodes, and have a size of their own.
    others = [batch for batch in batches if batch[0] > 1]
    sizes = len(found.today.sizes) - (len(others) < len(batches))
    assert found.least_padding.padding == least_by_size(others, sizes)


def least_by_size(batches: list[tuple[int, int]], most: int) -> int:
    """The least padding with so many sizes, one size after the other: the plain recurrence."""
    padded = [
        [
            sum((batches[last][0] - tokens) * times for tokens, times in batches[first : last + 1])
            for last in range(len(batches))
        ]
        for first in range(len(batches))
    ]
    least = padded[0]
    for _ in range(1, most):
        least = [
            min([least[last], *(least[at] + padded[at + 1][last] for at in range(last))])
            for last in range(len(batches))
        ]
    return least[-1]


def _measured(
    batches: list[tuple[int, int]], sizes: list[int], step: int, seqs: int
) -> CaptureSizes | None:
    """What is suggested for so many executions by tokens, with these sizes captured."""
    rows = {
        "unpadded_tokens": [tokens for tokens, _ in batches],
        "executions": [times for _, times in batches],
    }
    ran_ = pl.DataFrame(rows).with_columns(
        runtime_mode=pl.lit("PIECEWISE"),
        dummy=pl.lit(False),
        in_window=pl.lit(True),
        in_graph=pl.col("unpadded_tokens") <= sizes[-1],
    )
    graphs = pl.DataFrame({"num_tokens": sizes}).with_columns(
        runtime_mode=pl.lit("PIECEWISE"),
        uniform=pl.lit(0),
        kind=pl.lit("capture"),
        part=pl.lit("model"),
        worker=pl.lit(0),
    )
    metadata = {"scheduler": {"max_num_seqs": seqs, "speculative_tokens": step - 1}}
    known = facts.read(Session(Path(), metadata, "complete"))
    return capture_sizes.measure(known, (), graphs, ran_, DecodeStepTally())
