# SPDX-License-Identifier: Apache-2.0
"""Who held blocks at the end, and which blocks leaked."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.pool.holders import Holders
from analysis.renderers.html.chart import Bars, Chart, Segment, bar_label
from analysis.renderers.html.report import Report
from analysis.wording.formats import duration


def charts(report: Report) -> Iterator[Chart]:
    """One chart; none where nothing was held at the end, or nobody knows by whom."""
    holders = report.summary.holders
    if holders is None or not holders.held_blocks:
        return
    blocks = [holder.blocks for holder in holders.oldest]
    yield Chart(
        "holders",
        "Who held blocks at the end?",
        "An old holder is a long answer, or a client that went away unnoticed; held blocks that no "
        "request holds any more are a leak.",
        f"{holders.held_blocks:,} blocks were held at the end by {holders.requests:,} requests "
        f"that had not ended.{_leak(holders)}",
        Bars(
            [
                f"{bar_label(holder.request_id)}, for {duration(holder.age_sec)}"
                for holder in holders.oldest
            ],
            [f"{count:,}" for count in blocks],
            [Segment("blocks", blocks, "held")],
            "blocks, the oldest holder first",
        ),
    )


def _leak(holders: Holders) -> str:
    if not holders.leaked_blocks:
        return ""
    least = "at least " if holders.at_least else ""
    blocks = f"{least}{holders.leaked_blocks:,} blocks"
    return f" Leaked: {blocks}, which no running or waiting request holds."
