# SPDX-License-Identifier: Apache-2.0
"""Which requests ended, how did they end, and what did the aborted ones cost?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from analysis.tables.session import Session

TABLE = "requests"
ABORT = "abort"

_COLUMNS = (
    "input_length",
    "output_length",
    "preemptions",
    "finish_reason",
    "computed_tokens",
    "hit_tokens",
    "external_hit_tokens",
    "draft_tokens",
    "accepted_tokens",
)


@dataclass(frozen=True)
class Requests:
    """The requests that ended, aborted ones included, over all engines.

    ``by_reason``: how many ended for which of vLLM's finish reasons, the most frequent first.
    ``aborted_computed_tokens``: tokens that aborted requests had in the KV cache, those that they
    had found there included; ``aborted_wasted_tokens``: without these, so tokens that were
    computed for nothing. ``preempted``: requests that were preempted; one of them
    ``most_preemptions`` times, no other more often. ``draft_tokens``: that speculation proposed;
    ``accepted_tokens``: those of them that were accepted; ``acceptance``: their share, from 0 to 1.
    The last three are None where no request has any.
    """

    ended: int
    by_reason: Mapping[str, int]
    input_tokens: int
    output_tokens: int
    aborted: int
    aborted_computed_tokens: int
    aborted_wasted_tokens: int
    preempted: int
    most_preemptions: int
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    acceptance: float | None = None


def measure(session: Session) -> Requests:
    """The sums over requests.jsonl.

    Raises:
        SessionError: the file cannot be read.

    """
    preempted = pl.col("preemptions")
    found = pl.col("hit_tokens").fill_null(0) + pl.col("external_hit_tokens").fill_null(0)
    sums = [
        batch.group_by(pl.col("finish_reason").fill_null("unknown")).agg(
            pl.len().cast(pl.Int64).alias("ended"),
            pl.col("input_length", "output_length", "computed_tokens").sum(),
            pl.col("draft_tokens", "accepted_tokens").sum(),
            (pl.col("computed_tokens") - found).clip(0).sum().alias("wasted_tokens"),
            (preempted > 0).sum().cast(pl.Int64).alias("preempted"),
            preempted.max().fill_null(0).alias("most_preemptions"),
        )
        for batch in session.batches(TABLE, _COLUMNS)
    ]
    if not any(map(len, sums)):
        return Requests(0, {}, 0, 0, 0, 0, 0, 0, 0)
    reasons = (
        pl.concat(sums)
        .group_by("finish_reason")
        .agg(pl.exclude("most_preemptions").sum(), pl.col("most_preemptions").max())
        .sort("ended", "finish_reason", descending=[True, False])
    )
    drafted, accepted = (int(reasons[name].sum()) for name in ("draft_tokens", "accepted_tokens"))
    aborted = reasons.filter(pl.col("finish_reason") == ABORT)
    return Requests(
        ended=int(reasons["ended"].sum()),
        by_reason=dict(reasons.select("finish_reason", "ended").iter_rows()),
        input_tokens=int(reasons["input_length"].sum()),
        output_tokens=int(reasons["output_length"].sum()),
        aborted=int(aborted["ended"].sum()),
        aborted_computed_tokens=int(aborted["computed_tokens"].sum()),
        aborted_wasted_tokens=int(aborted["wasted_tokens"].sum()),
        preempted=int(reasons["preempted"].sum()),
        most_preemptions=max(reasons["most_preemptions"]),
        draft_tokens=drafted or None,
        accepted_tokens=accepted if drafted else None,
        acceptance=accepted / drafted if drafted else None,
    )
