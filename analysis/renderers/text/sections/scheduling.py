# SPDX-License-Identifier: Apache-2.0
"""What the scheduler did, and how the requests fared by how full the cache was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.renderers.text.layout import Line, row, table
from analysis.requests.scheduling import (
    EncoderInputs,
    PerStep,
    PhaseSteps,
    Pressure,
    Scheduling,
)
from analysis.wording.bands import BANDS
from analysis.wording.by_whom import POLICIES
from analysis.wording.formats import counted, seconds
from analysis.wording.phases import PHASES


def lines(scheduling: Scheduling, policy: str | None = None) -> Iterator[Line]:
    """The section; empty where nothing was ever scheduled."""
    requests, tokens, took = scheduling.requests, scheduling.tokens, scheduling.schedule_us
    if requests is None or tokens is None:
        return
    if policy is not None:
        yield from row("Policy", policy, POLICIES.get(policy, ""))
    kinds = (
        f"{scheduling.prefill_steps:,} of prompts, {scheduling.decode_steps:,} of answers, "
        f"{scheduling.mixed_steps:,} of both"
    )
    if scheduling.idle_steps:
        kinds += f"; {scheduling.idle_steps:,} more scheduled nothing"
    yield from row("Steps", f"{scheduling.steps:,}", kinds)
    yield from row("Requests a step", _counted(requests))
    yield from row("Tokens a step", _counted(tokens))
    if scheduling.encoder is not None:
        yield from row("Encoder", *_encoder(scheduling.encoder))
    if took is not None:
        scheduled = f"median {seconds(took.p50 / 1e6)}, 99th pct. {seconds(took.p99 / 1e6)}"
        yield from row("schedule() took", scheduled)
    yield from _by_phase(scheduling.by_phase)
    spreads = (
        ("Queued", scheduling.queued),
        ("First token after", scheduling.first_token),
        ("Finished after", scheduling.finish),
    )
    rows = [
        (name, *map(seconds, (spread.p50_sec, spread.p95_sec, spread.p99_sec, spread.max_sec)))
        for name, spread in spreads
        if spread.count
    ]
    if rows:
        yield from table(("From arrival", "median", "95th pct.", "99th pct.", "max"), rows)
    busy = [part for part in scheduling.by_pressure if part.arrived or part.preemptions]
    if len(busy) > 1:
        yield from table(
            ("While the pool was", "arrived", "queued 95th", "1st token 95th", "preempted"),
            [_pressure(part) for part in busy],
        )


def _by_phase(phases: Sequence[PhaseSteps]) -> Iterator[Line]:
    if len(phases) < 2:
        return
    rows = [
        (
            PHASES[each.phase],
            f"{each.steps:,}",
            f"{each.prefill_tokens:,}",
            f"{each.decode_tokens:,}",
            f"{each.tokens.mean:,.1f}",
        )
        for each in phases
    ]
    heads = ("Tokens by phase", "steps", "of prompts", "of answers", "a step")
    yield from table(heads, rows)


def _encoder(encoder: EncoderInputs) -> tuple[str, str]:
    tokens = "" if encoder.tokens is None else f", {encoder.tokens:,} tokens"
    return counted(encoder.items, "item"), f"in {counted(encoder.steps, 'step')}{tokens}"


def _counted(counted: PerStep) -> str:
    return (
        f"mean {counted.mean:,.1f}, median {counted.p50:,.0f}, 95th pct. {counted.p95:,.0f}, "
        f"max {counted.max:,.0f}"
    )


def _pressure(part: Pressure) -> tuple[str, ...]:
    return (
        f"{BANDS[part.band]} held",
        f"{part.arrived:,}",
        seconds(part.queued_p95_sec),
        seconds(part.first_token_p95_sec),
        f"{part.preemptions:,}",
    )
