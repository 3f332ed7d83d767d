# SPDX-License-Identifier: Apache-2.0
"""What requests share, and how much cache the contents take that were used lately."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.prefix.sharing import WorkingSet
from analysis.renderers.html.chart import (
    Bars,
    Chart,
    Segment,
    Table,
    axis,
    count_axis,
    line,
)
from analysis.renderers.html.report import Report
from analysis.wording.formats import seconds, share

MOST_ENGINES = 8
"""Engines whose curves are drawn."""


def stretches(report: Report) -> Iterator[Chart]:
    """The stretches of blocks that the same requests share."""
    yield _stretches(report)


def working_sets(report: Report) -> Iterator[Chart]:
    """The blocks that were used within windows of the session's time."""
    yield _working_sets(report)
    yield _curve(report)


def _stretches(report: Report) -> Chart:
    heading = "Which shared beginnings saved the most?"
    look = (
        "A long bar is a prefix to keep where it is, at the very start of the prompt; one that "
        "many requests share and few find is being evicted."
    )
    sharing = report.summary.sharing
    pieces = [piece for piece in sharing.pieces if piece.saved_tokens]
    if not pieces:
        return Chart("pieces", heading, look, "No request found what another one had computed.")
    labels = [f"tokens {piece.begin_token:,} to {piece.end_token:,}" for piece in pieces]
    saved = [piece.saved_tokens for piece in pieces]
    texts = [
        f"{piece.saved_tokens:,} (shared by {piece.requests:,}, found by {piece.found:,})"
        for piece in pieces
    ]
    return Chart(
        "pieces",
        heading,
        look,
        f"{sharing.sharing:,} of {sharing.requests:,} requests have a full block in common with "
        f"another. Drawn: the {len(pieces):,} stretches of blocks that the same requests share and "
        "that saved most, by where they lie in the prompt.",
        Bars(labels, texts, [Segment("saved", saved, "held")], "prompt tokens saved"),
        Table(
            ("Part of the prompt", "content", "requests", "found by", "tokens saved"),
            [
                (
                    label.capitalize(),
                    f"{piece.content_id}",
                    f"{piece.requests:,}",
                    f"{piece.found:,}",
                    f"{piece.saved_tokens:,}",
                )
                for label, piece in zip(labels, pieces, strict=True)
            ],
        ),
    )


def _working_sets(report: Report) -> Chart:
    heading = "How much cache would hold everything that was used lately?"
    look = (
        "Up to the window whose working set still fits the pool, what comes back can be found; "
        "beyond it, it is gone."
    )
    known = report.summary.sharing.working_sets
    if not known:
        nothing = "No request that ended has a content id (with prefix caching off there are none)."
        return Chart("working-set", heading, look, nothing)
    several = len({working_set.engine for working_set in known}) > 1
    labels = [_window(working_set, several=several) for working_set in known]
    peaks = [working_set.peak_blocks for working_set in known]
    pools = {working_set.pool_blocks for working_set in known if working_set.pool_blocks}
    pool = max(pools) if len(pools) == 1 else None
    upright = "" if pool is None else f" The pool has {pool:,} blocks: the upright line."
    return Chart(
        "working-set",
        heading,
        look,
        f"The most distinct contents that were used within so long a time.{upright}",
        Bars(
            labels,
            [f"{peak:,}" for peak in peaks],
            [Segment("blocks", peaks, "held")],
            "blocks",
            mark=pool,
        ),
        Table(
            ("Window", "mean blocks", "peak blocks", "of the pool"),
            [
                (
                    label,
                    _blocks(working_set.mean_blocks),
                    f"{working_set.peak_blocks:,}",
                    _of_pool(working_set),
                )
                for label, working_set in zip(labels, known, strict=True)
            ],
        ),
    )


def _curve(report: Report) -> Chart:
    heading = "How does the working set grow with the time that is looked back?"
    look = (
        "Where the curve crosses the pool is about how long content stays in the cache; where it "
        "is flat, nothing new comes, and more blocks find no more."
    )
    sharing = report.summary.sharing
    if not sharing.curve:
        nothing = "No request that ended has a content id, or no time passed."
        return Chart("working-set-curve", heading, look, nothing)
    pools = {known.engine: known.pool_blocks for known in sharing.working_sets}
    engines = sorted({level.engine for level in sharing.curve})[:MOST_ENGINES]
    of_engine = {
        engine: [level for level in sharing.curve if level.engine == engine] for engine in engines
    }
    name = "working set" if len(engines) == 1 else "engine {}"
    data = [
        line(
            name.format(engine),
            [level.window_sec for level in levels],
            [level.mean_blocks for level in levels],
            "held",
        )
        for engine, levels in of_engine.items()
    ]
    pool = pools.get(engines[0])
    if pool is not None:
        ends = [of_engine[engines[0]][at].window_sec for at in (0, -1)]
        data.append(line("the pool", ends, [pool] * 2, "regret"))
    gaps = [
        f"half of what was {what} came back within {seconds(gap.p50_sec)}"
        for what, gap in (("found", sharing.found_gap), ("missed", sharing.missed_gap))
        if gap.count
    ]
    words = f"; {', '.join(gaps)}" if gaps else ""
    return Chart(
        "working-set-curve",
        heading,
        look,
        f"Distinct blocks that were used within so long a time, on average{words}.",
        {
            "data": data,
            "layout": {
                "xaxis": axis("seconds that are looked back (logarithmic)", type="log"),
                "yaxis": count_axis("blocks"),
            },
        },
        Table(
            ("Engine", "window", "mean blocks"),
            [
                (f"{level.engine}", seconds(level.window_sec), _blocks(level.mean_blocks))
                for levels in of_engine.values()
                for level in levels[::4]
            ],
        ),
    )


def _window(known: WorkingSet, *, several: bool) -> str:
    window = "all of it" if known.window_sec is None else f"the last {known.window_sec:,.0f} s"
    return f"{window}, engine {known.engine}" if several else window


def _blocks(count: float | None) -> str:
    return "n/a" if count is None else f"{count:,.0f}"


def _of_pool(known: WorkingSet) -> str:
    return share(known.peak_blocks / known.pool_blocks if known.pool_blocks else None)
