# SPDX-License-Identifier: Apache-2.0
"""Waiting, scheduling, holders and empty slots in words, with figures as large as they get."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from analysis import open_session
from analysis.pool.fragmentation import Empty, Fragmentation
from analysis.pool.holders import Holder, Holders, Suspect
from analysis.pool.pressure import BANDS
from analysis.renderers.text.layout import Line
from analysis.renderers.text.sections import fragmentation, holders, scheduling, waiting
from analysis.requests.scheduling import (
    PHASES,
    EncoderInputs,
    PerStep,
    PhaseSteps,
    Pressure,
    Scheduling,
)
from analysis.requests.waiting import Reason, Waiting
from analysis.stats.spread import Spread
from analysis.tables import facts
from tests.analysis.builder import SessionBuilder

MANY, MOST_LORAS = 10**8, 10**6
LONG = "chatcmpl-" + "x" * 200

REASONS = [
    *("preempting", "token_budget", "max_num_seqs", "never_fits", "no_blocks", "whole_prompt"),
    *("watermark", "blocks", "no_chunking", "lora", "connector", "paused", "not_known"),
]


def said(lines: Iterable[Line]) -> str:
    """The lines, none of which is too long, as one."""
    rendered = ["".join(text for text, _ in line) for line in lines]
    assert all(len(line) <= 80 and line.isascii() for line in rendered)
    return " ".join(" ".join(rendered).split())


def limits(session: SessionBuilder) -> facts.Scheduler:
    settings = {"max_num_seqs": MANY, "max_num_batched_tokens": MANY, "max_loras": MOST_LORAS}
    session.metadata(scheduler=settings)
    return facts.read(open_session(session.folder)).scheduler


def test_every_reason_has_its_words(session: SessionBuilder) -> None:
    for name in REASONS:
        reason = Reason(MANY, 1, 0)
        text = said(waiting.lines(Waiting(MANY, MANY, MANY, {name: reason}), limits(session)))
        assert text.endswith("100.00 % 100.00 %")


def test_the_largest_reasons_and_the_rest(session: SessionBuilder) -> None:
    found = Waiting(
        10, 4, 3, {name: Reason(2, 0.2, 25) for name in ("lora", "paused", *REASONS[:3])}
    )
    text = said(waiting.lines(found, limits(session)))
    assert "Waited 10.00 s of all requests together up to 3 at once, during 4.00 s" in text
    assert "No slot for its adapter (1,000,000) 2.00 s 20.00 % 75.00 %" in text
    assert text.endswith("1 other reason 2.00 s 20.00 %")
    assert said(waiting.lines(Waiting(0, 0, 0, {}), limits(session))) == ""


def test_holders() -> None:
    found = Holders(
        at_sec=MANY,
        held_blocks=MANY,
        requests=MANY,
        blocks=2 * MANY,
        oldest=(Holder(LONG, 0, MANY, 0, 0, MANY),) * 5,
        leaked_blocks=MANY,
        at_least=True,
        idle_sec=MANY,
        suspects=(Suspect(LONG, 0, MANY, 0),) * 5,
    )
    text = said(holders.lines(found))
    assert "200,000,000 if shared blocks count for each" in text
    assert "Leaked at least 100,000,000 blocks" in text
    assert text.count("chatcmpl-") == 2 * holders.SHOWN
    assert said(holders.lines(replace(found, held_blocks=0))) == ""
    assert said(holders.lines(None)) == ""


SPREAD = Spread(MANY, MANY, MANY, MANY, MANY, MANY, MANY, ())
COUNTED = PerStep(MANY, MANY, MANY, MANY, MANY)


def pressure(band: str, arrived: int, preemptions: int = 0) -> Pressure:
    return Pressure(band, MANY, 1, 1, preemptions, arrived, MANY, MANY, MANY, MANY)


def test_scheduling() -> None:
    found = Scheduling(
        *(MANY, MANY, MANY, MANY, MANY),
        *(COUNTED, COUNTED, COUNTED),
        *(SPREAD, SPREAD, SPREAD),
        by_pressure=tuple(pressure(band, MANY, MANY) for band in BANDS),
        by_phase=tuple(PhaseSteps(phase, MANY, MANY, MANY, COUNTED) for phase in PHASES),
        encoder=EncoderInputs(MANY, MANY, MANY),
    )
    text = said(scheduling.lines(found))
    assert "Steps 100,000,000 100,000,000 of prompts, 100,000,000 of answers" in text
    assert "over 90 % held 100,000,000" in text
    quiet = (pressure("under_40", 5), pressure("over_90", 0))
    assert "While the pool was" not in said(scheduling.lines(replace(found, by_pressure=quiet)))
    quiet = (pressure("under_40", 5), pressure("over_90", 0, 1))
    assert "While the pool was" in said(scheduling.lines(replace(found, by_pressure=quiet)))
    assert said(scheduling.lines(replace(found, requests=None))) == ""


@pytest.mark.parametrize(("share", "sizes"), [(0.5, True), (0.001, False)])
def test_empty_slots(share: float, sizes: bool) -> None:
    found = Fragmentation(
        requests=MANY,
        slots=MANY,
        empty_slots=MANY,
        actual=Empty(16, share, None),
        by_block_size=tuple(Empty(size, None, share) for size in (8, 16, 32, 64, 128)),
        filled_at_peak_pct=99.5,
    )
    text = said(fragmentation.lines(found))
    assert "so at the peak 99.50 % of all slots were filled" in text
    assert ("By block size 50.00 % at 8" in text) == sizes
    assert said(fragmentation.lines(None)) == ""
