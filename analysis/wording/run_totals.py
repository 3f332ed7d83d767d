# SPDX-License-Identifier: Apache-2.0
"""What the whole run was, where the tables have only its end."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.summary import Summary
from analysis.tables.run_totals import RunTotals
from analysis.wording.formats import duration, share, with_details
from analysis.wording.printable import abridged, printable
from analysis.wording.session import Fact

HEADING = "The whole run"


def facts(summary: Summary) -> Iterator[Fact]:
    """Its figures; none where the others are of the whole run, too, or it has not been counted."""
    run = summary.run
    about = summary.session
    if run is None or (about.window is None and about.period is None):
        return
    with_what = "with what was removed" if about.window is not None else "with all periods"
    yield Fact("Time", f"{duration(run.until_sec)}, {with_what}")
    yield Fact("Requests", _requests(run))
    yield Fact("Tokens", f"{run.input_tokens:,} in, {run.output_tokens:,} out")
    if run.token_rate is not None:
        found = f"{run.hit_tokens:,} of {run.query_tokens:,} prompt tokens"
        yield Fact("Hit rate", with_details(share(run.token_rate), [found]))
    yield Fact("Preemptions", f"{run.preemptions:,}")
    unused = f"{run.never_reused_blocks:,} never reused" if run.evicted_blocks else None
    yield Fact("Blocks allocated", f"{run.allocated_blocks:,}")
    yield Fact("Blocks evicted", with_details(f"{run.evicted_blocks:,}", [unused]))
    yield Fact("Most held", f"{run.peak_held_blocks:,} blocks at once")


def _requests(run: RunTotals) -> str:
    reasons = [
        f"{count:,} {abridged(printable(reason))}" for reason, count in run.by_reason.items()
    ]
    ended = with_details(f"{run.ended:,} ended", [", ".join(reasons)] if reasons else [])
    return f"{run.requests:,} admitted, {ended}"
