# SPDX-License-Identifier: Apache-2.0
"""How long steps took on the GPU: the figures, on sessions small enough to count by hand."""

from __future__ import annotations

from typing import Any

import pytest

from analysis import open_session, summarize
from analysis.gpu import gpu_time
from analysis.gpu.gpu_time import GpuTime
from analysis.renderers.text.summary import render
from tests.analysis.builder import SessionBuilder
from tests.analysis.timed import timed, with_gpu_time


def measured(session: SessionBuilder, **options: Any) -> GpuTime:
    return gpu_time.measure(open_session(session.folder, **options))


def section_of(session: SessionBuilder) -> str:
    text = render(summarize(open_session(session.folder)))
    return text.partition("\nGPU time by phase\n")[2].partition("\n\n")[0]


def test_by_phase(session: SessionBuilder) -> None:
    with_gpu_time(session)
    found = measured(session)
    assert (found.workers, found.steps, found.timed) == (1, 6, 5)
    assert found.gpu_sec == pytest.approx(0.96)
    assert found.busy_share == pytest.approx(0.096)
    prefill, mixed, decode = found.by_phase
    assert (prefill.phase, prefill.steps, prefill.prefill_tokens) == ("prefill", 2, 1500)
    assert prefill.gpu_sec == pytest.approx(0.6)
    assert prefill.share == pytest.approx(0.6 / 0.96)
    assert (prefill.step.count, prefill.step.p50_sec) == (2, pytest.approx(0.3))
    # A mixed step is neither: its time cannot be divided.
    assert (mixed.phase, mixed.steps) == ("mixed", 1)
    assert (mixed.prefill_tokens, mixed.decode_tokens) == (400, 4)
    assert mixed.gpu_sec == pytest.approx(0.3)
    assert (decode.phase, decode.steps, decode.decode_tokens) == ("decode", 3, 10)
    assert (decode.step.count, decode.step.max_sec) == (2, pytest.approx(0.04))


def test_the_encoder(session: SessionBuilder) -> None:
    with_gpu_time(session)
    encoder = measured(session).encoder
    assert encoder is not None
    assert (encoder.steps, encoder.items, encoder.step.count) == (1, 2, 1)
    assert encoder.gpu_sec == pytest.approx(0.1)
    assert encoder.share == pytest.approx(0.1 / 0.96)
    assert measured(session, after_sec=1.5).encoder is None


def test_an_encoder_without_time(session: SessionBuilder) -> None:
    timed(session, (1, 10, 0, 500), encoder_items=3, encoder_us="")
    encoder = measured(session).encoder
    assert encoder is not None
    assert (encoder.items, encoder.step.count) == (3, 0)
    assert "Encoder             n/a  of that, for 3 items in 1 step" in section_of(session)


def test_each_worker_has_a_gpu(session: SessionBuilder) -> None:
    with_gpu_time(session)
    timed(session, (3, 400, 4, 540_000), worker=1)
    found = measured(session)
    assert (found.workers, found.steps, found.timed) == (2, 7, 6)
    assert found.busy_share == pytest.approx(1.5 / 20)
    assert found.by_phase[1].steps == 2


def test_after_the_warm_up(session: SessionBuilder) -> None:
    with_gpu_time(session)
    found = measured(session, after_sec=3.5)
    assert [each.phase for each in found.by_phase] == ["decode"]
    assert found.busy_share == pytest.approx(0.06 / 6.5)


def test_the_section(session: SessionBuilder) -> None:
    with_gpu_time(session)
    section = section_of(session)
    for line in (
        "Steps               6  of 1 worker, 5 of them timed",
        "On the GPU          960.0 ms  9.60 % of the time",
        "Of phase          steps  GPU time   of all    median  99th pct.  tokens a step",
        "Prefill alone         2  600.0 ms  62.50 %  300.0 ms   398.0 ms          750.0",
        "Mixed                 1  300.0 ms  31.25 %  300.0 ms   300.0 ms          404.0",
        "Decode alone          3   60.0 ms   6.25 %   30.0 ms    39.8 ms            3.3",
        "Encoder             100.0 ms  of that, for 2 items in 1 step; median 100.0 ms,",
    ):
        assert line in section


def test_without_a_gpu_it_says_so(session: SessionBuilder) -> None:
    session.metadata(phases={"workers": [], "problem": "no GPU events: the workers run on cpu"})
    assert section_of(session).strip() == "Not timed: no GPU events: the workers run on cpu."


def test_not_asked_for_is_not_mentioned(session: SessionBuilder) -> None:
    assert "GPU time by phase" not in render(summarize(open_session(session.folder)))
