# SPDX-License-Identifier: Apache-2.0
"""How long steps took on the GPU."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.gpu.gpu_time import GpuTime, PhaseTime
from analysis.renderers.text.layout import Line, note, row, table
from analysis.wording.formats import counted, seconds, share
from analysis.wording.phases import PHASES


def lines(measured: GpuTime) -> Iterator[Line]:
    """The section; empty where nothing was asked for."""
    if measured.problem is not None:
        what = "Not all was timed" if measured.steps else "Not timed"
        yield from note(f"{what}: {measured.problem}.")
    if not measured.steps:
        return
    timed = f"of {counted(measured.workers, 'worker')}, {measured.timed:,} of them timed"
    yield from row("Steps", f"{measured.steps:,}", timed)
    busy = "" if measured.busy_share is None else f"{share(measured.busy_share)} of the time"
    yield from row("On the GPU", seconds(measured.gpu_sec), busy)
    yield from table(
        ("Of phase", "steps", "GPU time", "of all", "median", "99th pct.", "tokens a step"),
        [_phase(each) for each in measured.by_phase],
    )
    encoder = measured.encoder
    if encoder is not None:
        yield from row(
            "Encoder",
            seconds(encoder.gpu_sec) if encoder.step.count else "n/a",
            f"of that, for {counted(encoder.items, 'item')} in {counted(encoder.steps, 'step')}; "
            f"median {seconds(encoder.step.p50_sec)}, 99th pct. {seconds(encoder.step.p99_sec)}",
        )


def _phase(each: PhaseTime) -> tuple[str, ...]:
    return (
        PHASES[each.phase],
        f"{each.steps:,}",
        seconds(each.gpu_sec) if each.step.count else "n/a",
        "n/a" if each.share is None else share(each.share),
        seconds(each.step.p50_sec),
        seconds(each.step.p99_sec),
        f"{(each.prefill_tokens + each.decode_tokens) / each.steps:,.1f}",
    )
