# SPDX-License-Identifier: Apache-2.0
"""What failed, a line each; and the measures that there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from analysis.judgement.check import Checked, Result
from analysis.judgement.measures import Measure
from analysis.renderers.text.layout import Line, row
from analysis.renderers.text.painting import paint, plain
from analysis.wording.measures import exact


def write(found: Checked, out: TextIO) -> None:
    """Print what failed."""
    paint(lambda _: _layout(found), out)


def render(found: Checked) -> str:
    """What failed, as plain text."""
    return plain(lambda _: _layout(found))


def write_catalogue(catalogue: Sequence[Measure], out: TextIO) -> None:
    """Print the measures that there are."""
    paint(lambda _: _catalogue(catalogue), out)


def _layout(found: Checked) -> Iterator[Line]:
    failed = [result for result in found.results if result.failed]
    cells = [(result.measure, _value(result), _limit(result)) for result in failed]
    names = max((len(name) for name, _, _ in cells), default=0)
    values = max((len(value) for _, value, _ in cells), default=0)
    for name, value, limit in cells:
        yield (
            ("FAIL  ", "warning"),
            (f"{name:<{names}}  ", "label"),
            (f"{value:>{values}}", "figure"),
            (f"  {limit}", ""),
        )
    count = len(found.results)
    if failed:
        verdict = f"{len(failed)} of {count} rules failed"
    else:
        verdict = f"{count} rules passed" if count != 1 else "1 rule passed"
    yield ((f"{found.session.session_id}: {verdict}", "warning" if failed else "good"),)


def _value(result: Result) -> str:
    return "no value" if result.value is None else exact(result.value, result.unit)


def _limit(result: Result) -> str:
    why = result.reason
    if result.limit is not None and why is None:
        why = f"limit {exact(result.limit, result.unit)}"
        if result.baseline is not None:
            why += f", baseline {exact(result.baseline, result.unit)}"
    return f"({why}): fails if {result.fails_if}"


def _catalogue(catalogue: Sequence[Measure]) -> Iterator[Line]:
    for measure in catalogue:
        direction = f", {measure.better} is better" if measure.better else ""
        yield from row(measure.name, measure.unit + direction, measure.says)
