# SPDX-License-Identifier: Apache-2.0
"""What ran, and what recording it took."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.text.layout import Line, row
from analysis.summary import Summary
from analysis.tables.facts import Cost
from analysis.wording import run_totals, session
from analysis.wording.session import Fact


def lines(summary: Summary) -> Iterator[Line]:
    about = summary.session
    for fact in session.facts(summary.facts, summary.usage, about.started_at, about.duration_sec):
        yield from _fact(fact)
    if (marks := session.marks(about)) is not None:
        yield from _fact(marks)


def whole_run(summary: Summary) -> Iterator[Line]:
    for fact in run_totals.facts(summary):
        yield from _fact(fact)


def profiling(cost: Cost) -> Iterator[Line]:
    yield from _fact(session.cost(cost))


def _fact(fact: Fact) -> Iterator[Line]:
    yield from row(fact.label, fact.value)
    if fact.remark:
        yield from row("", fact.remark)
