# SPDX-License-Identifier: Apache-2.0
"""The next deployment, sized by a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from analysis.headroom.deployment import Deployment, Size
from analysis.plan.explain import Step
from analysis.renderers.text.layout import Line, row, section, table, wrapped
from analysis.renderers.text.painting import paint, plain
from analysis.wording.formats import counted, seconds


def write(found: Deployment, out: TextIO) -> None:
    """Print it."""
    paint(lambda _: _layout(found), out)


def render(found: Deployment) -> str:
    """It as plain text."""
    return plain(lambda _: _layout(found))


def _layout(found: Deployment) -> Iterator[Line]:
    yield (("A deployment for requests like those of ", ""), (found.session, "title"))
    yield from section("GPUs", _sizes(found))
    yield from section("A replica", _replica(found))
    yield from section("Step by step", _steps(found.steps))
    notes = (line for text in found.notes for line in wrapped("  - ", text, "", ""))
    yield from section("To know", notes)


def _sizes(found: Deployment) -> Iterator[Line]:
    heads = ("Requests a second", "GPUs", "each takes", "at once", "99 %", "a request")
    yield from table(heads, [_size(size) for size in found.sizes])


def _size(size: Size) -> tuple[str, ...]:
    return (
        rate(size.per_sec),
        f"{size.gpus:,}",
        rate(size.each.per_sec),
        f"{size.each.at_once:,.1f}",
        f"{size.each.p99_at_once:,}",
        seconds(size.each.request_sec),
    )


def rate(per_sec: float) -> str:
    """Requests a second, with as many digits as tell rates apart."""
    return f"{per_sec:,.2f}" if per_sec >= 1 else f"{per_sec:.3g}"


def _replica(found: Deployment) -> Iterator[Line]:
    most = found.most
    at_once = f"{most.at_once:,.1f} at once on average, up to {most.p99_at_once:,} for 99 % of the"
    took = f"time; a request takes {seconds(most.request_sec)}, a step {seconds(most.step_sec)}"
    yield from row("Takes at most", f"{rate(most.per_sec)} a second", f"{at_once} {took}")
    limit = (
        "no max_num_seqs" if found.max_num_seqs is None else f"max_num_seqs {found.max_num_seqs:,}"
    )
    fit = "all that were drawn" if found.fit is None else counted(found.fit, "request")
    rest = f"{fit} fit into {found.pool_blocks:,} blocks but for 1 % of the time; {limit}"
    yield from row("Places", f"{found.places:,}", rest)
    yield from row("GPUs of a replica", f"{found.gpus:,}", "tensor x pipeline parallel")
    if found.per_sec is not None and found.recorded_at_once is not None:
        planned = "more than it can compute"
        if found.planned_at_once is not None:
            planned = f"{found.planned_at_once:,.2f} by this arithmetic"
        rest = f"of an engine; {found.recorded_at_once:,.2f} requests at once, {planned}"
        yield from row("The session's rate", f"{rate(found.per_sec)} a second", rest)


def _steps(steps: tuple[Step, ...]) -> Iterator[Line]:
    for step in steps:
        source = f" ({step.source})" if step.source else ""
        result = f"{step.result:,.3f}".rstrip("0").rstrip(".")
        text = f"{step.arithmetic} = {result} {step.unit}{source}"
        yield from wrapped(f"  {step.name} = ", text, "label", "")
