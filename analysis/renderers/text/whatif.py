# SPDX-License-Identifier: Apache-2.0
"""What a workload would have done under other configurations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TextIO

from analysis.renderers.text.layout import Line, note, section, table, wrapped
from analysis.renderers.text.painting import paint, plain
from analysis.whatif.clock import StepTime
from analysis.whatif.outcome import Outcome
from analysis.whatif.simulated import Simulated
from analysis.wording.formats import byte_size, counted, number, seconds, share
from analysis.wording.printable import shortened
from analysis.wording.whatif import FIGURES

_LABEL = 30


def write(found: Simulated, out: TextIO) -> None:
    """Print what was found."""
    paint(lambda _: _layout(found), out)


def render(found: Simulated) -> str:
    """What was found as plain text."""
    return plain(lambda _: _layout(found))


def _layout(found: Simulated) -> Iterator[Line]:
    yield (("What if  ", "label"), (shortened(found.name, 70), "title"))
    yield from note(_how(found))
    yield from section("Cache", _cache(found))
    yield from section("Host memory", _host(found))
    yield from section("Scheduling", _scheduling(found))
    yield from section("How true the simulation is", _truth(found))
    yield from section("Not simulated", _failures(found))


def _how(found: Simulated) -> str:
    engines = "" if found.engines == 1 else f" on {found.engines} engines"
    release = f"vLLM {found.vllm}" if found.vllm else "vLLM"
    warm_up = f", the first {found.warm_up:,} as warm-up" if found.warm_up else ""
    other = found.recorded_vllm not in (None, found.vllm)
    recorded = f", recorded with {found.recorded_vllm}" if other else ""
    return (
        f"{counted(found.requests, 'request')}{engines}{warm_up}, simulated through "
        f"{release}'s own scheduler{recorded}. {_clock(found.step_time)}"
    )


def _clock(step_time: StepTime) -> str:
    if step_time.steps is None:
        return f"A step takes {seconds(step_time.constant_sec)} on the simulated clock."
    parts = [
        f"{seconds(value)}{of}"
        for value, of in (
            (step_time.constant_sec, ""),
            (step_time.prefill_token_sec, " a prefill token"),
            (step_time.decode_token_sec, " a decode token"),
            (step_time.request_sec, " a request"),
        )
        if value
    ]
    error = step_time.rms_error_sec or 0.0
    return (
        f"A step takes {' + '.join(parts) or '0 s'} on the simulated clock, fitted to "
        f"{counted(step_time.steps, 'step')} of {seconds(step_time.mean_sec)} on average with a "
        f"root mean square error of {seconds(error)}."
    )


def _rows(found: Simulated) -> list[Outcome]:
    first = [outcome for outcome in (found.measured, found.baseline) if outcome is not None]
    return [*first, *found.outcomes]


def _cache(found: Simulated) -> Iterator[Line]:
    heads = ("", "", "usable blocks", "hit rate", "evictions")
    rows = [
        (
            shortened(outcome.label, _LABEL),
            FIGURES[outcome.engine],
            number(outcome.num_blocks),
            share(outcome.hit_rate),
            number(outcome.evictions),
        )
        for outcome in _rows(found)
    ]
    if rows:
        yield from table(heads, rows)
    yield from _compared(found)


def _host(found: Simulated) -> Iterator[Line]:
    """What the pool found, and what host memory found beyond it."""
    rows = _rows(found)
    if not any(outcome.host for outcome in rows):
        return
    heads = ("", "pool", "host", "loaded", "stored", "saved")
    cells = []
    for outcome in rows:
        host = outcome.host
        cells.append(
            (
                shortened(outcome.label, _LABEL - 2),
                share(outcome.hit_rate),
                share(host.hit_rate) if host else "",
                byte_size(host.loaded_bytes) if host else "",
                byte_size(host.stored_bytes) if host else "",
                seconds(host.saved_sec) if host else "",
            )
        )
    yield from table(heads, cells)
    yield from note(_saved(rows))


def _saved(rows: list[Outcome]) -> str:
    """What the time saved is, and how well it is known."""
    hosts = [outcome.host for outcome in rows if outcome.host and outcome.host.gib is not None]
    what = (
        "pool and host: shares of the prompt tokens, each found there first. Saved: what "
        "computing the loaded tokens would have taken, less what copying them back took"
    )
    sure = next((host.confidence for host in hosts if host.confidence), None)
    if sure is None:
        return f"{what}; it is not known, as a step's time does not say what a prompt token takes."
    return f"{what}; {sure} confidence, by the fit of the step times."


def _compared(found: Simulated) -> Iterator[Line]:
    """Which requests the hit rates are of, where that is not all of them."""
    rows = _rows(found)
    if found.left_out:
        compared = max(outcome.requests for outcome in rows if outcome.engine == "exact")
        yield from note(
            f"The hit rates are of the same {counted(compared, 'request')}: of those that every "
            f"configuration served. {found.left_out:,} that not every one served are left out."
        )
    for outcome in rows:
        never = counted(outcome.failed_requests, "request")
        if outcome.failed_requests:
            yield from note(f"{outcome.label}: {never} can never fit into the pool.")
        if found.left_out and outcome.served and outcome.served.requests != outcome.requests:
            yield from note(
                f"{outcome.label}: of all {outcome.served.requests:,} that it served, the hit rate "
                f"is {share(outcome.served.hit_rate)}."
            )


def _scheduling(found: Simulated) -> Iterator[Line]:
    heads: tuple[str, ...] = ("", "preempted", "recomputed", "steps", "queue mean", "p99")
    # Users that wait ask sooner where answers come sooner; any others ask when they asked.
    with_time = any(_USERS.search(outcome.label) for outcome in found.outcomes)
    if with_time:
        heads = ("", "preempted", "recomputed", "steps", "queued", "p99", "time")
    rows = [
        (
            shortened(outcome.label, _LABEL),
            number(outcome.preemptions),
            number(outcome.recomputed_tokens),
            number(outcome.steps),
            seconds(outcome.queue_mean_sec),
            seconds(outcome.queue_p99_sec),
            *([seconds(outcome.span_sec)] if with_time else []),
        )
        for outcome in _rows(found)
    ]
    if rows:
        yield from table(heads, rows)


_USERS = re.compile(r"\busers?\b")
"""In the label of a configuration with users that wait."""


def _truth(found: Simulated) -> Iterator[Line]:
    was, now = found.measured, found.baseline
    if was is not None and now is not None:
        yield from note(f"The recorded configuration, simulated, {_beside(was, now)}.")
        yield from _waited(was.queue_mean_sec, now.queue_mean_sec)
    for line in found.notes:
        yield from wrapped("  - ", line, "warning", "")


def _beside(was: Outcome, now: Outcome) -> str:
    if was.hit_rate is None or now.hit_rate is None:
        return "asked the cache for nothing"
    points = 100 * (now.hit_rate - was.hit_rate)
    apart = f"{abs(points):.2f} points {'above' if points > 0 else 'below'}"
    rate = f"has a hit rate {apart} that of"
    if abs(points) < 0.005:
        rate = "has the same hit rate as"
    if not was.evictions:
        return f"{rate} the session, and {number(now.evictions)} evictions where it had none"
    more = (now.evictions or 0) / was.evictions - 1
    return f"{rate} the session, and {100 * more:+.1f} % evictions"


def _waited(was: float | None, now: float | None) -> Iterator[Line]:
    if was is None or now is None:
        return
    is_far = max(was, now) > _FAR * min(was, now) + _FAR_SEC
    guess = ": the simulated queue times are no more than a guess" if is_far else ""
    yield from note(
        f"Requests wait {seconds(now)} on average in the simulation, and waited {seconds(was)} in "
        f"the session{guess}."
    )


_FAR, _FAR_SEC = 2.0, 0.001
"""A queue that is so many times and so many seconds longer is another queue."""


def _failures(found: Simulated) -> Iterator[Line]:
    for failure in found.failures:
        yield from wrapped(f"  {failure.label}: ", failure.reason, "label", "warning")
