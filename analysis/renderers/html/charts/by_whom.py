# SPDX-License-Identifier: Apache-2.0
"""Whose requests found what in the cache."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import Bars, Chart, Segment, Table, bar_label
from analysis.renderers.html.report import Report
from analysis.requests.by_whom import Split
from analysis.wording.by_whom import NAMES, rows
from analysis.wording.formats import counted, number, seconds, share
from analysis.wording.printable import abridged

SHOWN = 10


def charts(report: Report) -> Iterator[Chart]:
    found = report.summary.by_whom
    for split in found.splits:
        if split.keys > 1:
            yield _chart(split)


def _chart(split: Split) -> Chart:
    name = NAMES[split.by]
    parts = rows(split, SHOWN)
    labels = [bar_label(label) for label, _ in parts]
    new = [part.missed_by_reason.get("compulsory", 0) for _, part in parts]
    again = [part.missed_by_reason.get("capacity", 0) for _, part in parts]
    found = [part.hit_tokens for _, part in parts]
    others = [
        part.query_tokens - sum(counts)
        for (_, part), *counts in zip(parts, found, new, again, strict=True)
    ]
    segments = (
        Segment("found in the cache", found, "cached"),
        Segment("new", new, "held"),
        Segment("computed again", again, "regret"),
        Segment("missed for other reasons", others, "free"),
    )
    return Chart(
        f"by-{split.by}",
        f"Which {name} found what in the cache?",
        "Tokens computed again are the ones that a larger pool would have kept; the table says "
        "whose requests evicted them, and how long each waited.",
        f"The session has {counted(split.keys, 'key')} of this kind, those without one included.",
        Bars(
            labels,
            [share(part.hit_rate) for _, part in parts],
            [segment for segment in segments if any(segment.values)],
            "prompt tokens",
        ),
        Table(
            (
                name,
                "requests",
                "prompt tokens",
                "found",
                "new",
                "new to it alone",
                "computed again",
                "blocks evicted",
                "blocks lost",
                "cost others, tokens",
                "held, block-s",
                "kept, block-s",
                "queued, 95th pct.",
                "1st token, 95th pct.",
                "preempted",
            ),
            [
                (
                    abridged(label),
                    f"{part.requests:,}",
                    f"{part.query_tokens:,}",
                    f"{part.hit_tokens:,}",
                    f"{part.missed_by_reason.get('compulsory', 0):,}",
                    number(part.known_elsewhere_tokens),
                    f"{part.missed_by_reason.get('capacity', 0):,}",
                    f"{part.evicted_blocks:,}",
                    f"{part.lost_blocks:,}",
                    f"{part.of_others_tokens:,}",
                    f"{part.held:,.1f}",
                    f"{part.kept:,.1f}",
                    seconds(part.queued_p95_sec),
                    seconds(part.first_token_p95_sec),
                    f"{part.preempted:,}",
                )
                for label, part in parts
            ],
        ),
    )
