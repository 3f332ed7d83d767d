# SPDX-License-Identifier: Apache-2.0
"""vLLM's own figures beside the session's, each difference with its parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TextIO

from analysis.engine_metrics import Explanation, Reconciliation, Row
from analysis.renderers.text.layout import Line, note, section, wrapped
from analysis.renderers.text.painting import paint, plain
from analysis.wording.formats import counted, duration
from analysis.wording.measures import NONE, exact
from analysis.wording.measures import figure as shown

_NAME, _CELL = 42, 11
_LEAST_POINTS = 0.005
"""Smaller differences of shares would be shown as 0.00 points."""

_STYLES = {"equal": "good", "explained": "", "unexplained": "warning", "not comparable": "label"}


def write(found: Reconciliation, out: TextIO) -> None:
    """Print the figures."""
    paint(lambda _: _layout(found), out)


def render(found: Reconciliation) -> str:
    """The figures as plain text."""
    return plain(lambda _: _layout(found))


def _layout(found: Reconciliation) -> Iterator[Line]:
    yield (("vLLM's own metrics beside  ", "label"), (found.session_id, "title"))
    yield from wrapped("Metrics   ", found.source, "label", "")
    if found.scraped_sec is not None:
        at, end = duration(found.scraped_sec), duration(found.session_end_sec)
        yield ((f"          taken at {at} of the session's {end}", "label"),)
    for doubt in found.doubts:
        yield from wrapped("Warning   ", doubt, "warning", "warning")
    yield ()
    yield ((f"{'':<{_NAME}}{'vLLM':>{_CELL}}{'session':>{_CELL}}", "label"),)
    for row in found.rows:
        yield from _row(row)
    yield from section("Not on the page", _missing(found))
    yield ()
    yield (_verdict(found),)


def _row(row: Row) -> Iterator[Line]:
    name = row.metric.removeprefix("vllm:")
    vllm, session = _figures(row)
    figures = f"{vllm:>{_CELL}}{session:>{_CELL}}"
    verdict = (f"  {row.verdict}", _STYLES[row.verdict])
    if len(name) < _NAME:
        yield (f"{name:<{_NAME}}", ""), (figures, "figure"), verdict
    else:
        yield ((name, ""),)
        yield (" " * _NAME, ""), (figures, "figure"), verdict
    if row.difference and row.verdict != "not comparable":
        yield ((f"  {_signed(row.difference, row.unit)}, of which", "label"),)
        for part in row.parts:
            yield from wrapped(f"    {_amount(part, row.unit)}  ", part.says, "figure", "")
        if row.unexplained:
            left = f"    {_signed(row.unexplained, row.unit)}  "
            yield from wrapped(left, "unexplained", "warning", "warning")
    if row.note and (row.difference or row.verdict == "not comparable"):
        yield from wrapped("    ", row.note, "", "label")


def _amount(part: Explanation, unit: str) -> str:
    if part.least == part.most:
        return _signed(part.least, unit)
    if math.isinf(part.most):
        return f"{_signed(part.least, unit)} or more"
    return f"{_signed(part.least, unit)} to {_signed(part.most, unit)}"


def _figures(row: Row) -> tuple[str, str]:
    """Both figures, with as many digits as it takes to see that they differ."""
    shown_alike = _figure(row.vllm, row.unit), _figure(row.session, row.unit)
    if row.vllm is None or row.session is None or not row.difference:
        return shown_alike
    if shown_alike[0] != shown_alike[1]:
        return shown_alike
    return exact(row.vllm, row.unit), exact(row.session, row.unit)


def _signed(value: float, unit: str) -> str:
    if not value:
        return "0"
    if unit == "share":
        points = 100 * value
        return f"{points:+.2f} points" if abs(points) >= _LEAST_POINTS else f"{points:+.3g} points"
    text = _figure(abs(value), unit)
    return f"{'-' if value < 0 else '+'}{text}"


def _figure(value: float | None, unit: str) -> str:
    return NONE if value is None else shown(value, unit)


def _missing(found: Reconciliation) -> Iterator[Line]:
    for name in found.missing:
        why = "" if "kv_block" not in name else " (vllm serve --kv-cache-metrics has it)"
        yield from note(f"{name}{why}")


def _verdict(found: Reconciliation) -> tuple[str, str]:
    left = [row for row in found.rows if row.verdict == "unexplained"]
    if not left:
        explained = sum(row.verdict == "explained" for row in found.rows)
        though = f"; {counted(explained, 'difference')} explained" if explained else ""
        return f"vLLM and the session agree{though}.", "good"
    names = ", ".join(row.metric.removeprefix("vllm:") for row in left)
    return f"Not explained: {names}.", "warning"
