# SPDX-License-Identifier: Apache-2.0
"""Why requests waited."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.text.layout import Line, row, table
from analysis.requests.waiting import Waiting
from analysis.tables.facts import Scheduler
from analysis.wording.formats import percent, seconds, share
from analysis.wording.waiting import reason_name

SHOWN = 4
"""Reasons that have a line of their own."""


def lines(waiting: Waiting, scheduler: Scheduler) -> Iterator[Line]:
    """The section; empty where no request waited."""
    if not waiting.by_reason:
        return
    figure = f"{seconds(waiting.request_sec)} of all requests together"
    how = f"up to {waiting.most:,} at once, during {seconds(waiting.waited_sec)}"
    yield from row("Waited", figure, how)
    reasons = list(waiting.by_reason.items())
    rows = [
        (
            reason_name(name, scheduler),
            seconds(reason.request_sec),
            share(reason.share),
            percent(None if reason.usage_pct is None else 100 - reason.usage_pct),
        )
        for name, reason in reasons[:SHOWN]
    ]
    rest = [reason for _, reason in reasons[SHOWN:]]
    if rest:
        total, part = sum(r.request_sec for r in rest), sum(r.share for r in rest)
        others = "1 other reason" if len(rest) == 1 else f"{len(rest)} other reasons"
        rows.append((others, seconds(total), share(part), ""))
    yield from table(("", "waited", "share", "pool not held"), rows)
