# SPDX-License-Identifier: Apache-2.0
"""What is used again, after how long, and how much cache that takes."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.prefix.sharing import Sharing, Stretch, WorkingSet
from analysis.renderers.text.layout import Line, note, row, table
from analysis.stats.spread import Spread
from analysis.wording.formats import seconds, share

SHOWN = 5


def lines(sharing: Sharing) -> Iterator[Line]:
    """The section; empty where no content is known."""
    if not sharing.contents:
        return
    yield from row(
        "Sharing",
        f"{sharing.sharing:,} of {sharing.requests:,} requests",
        f"have a full block in common with another; of {sharing.contents:,} contents "
        f"{sharing.shared_contents:,} are shared",
    )
    pieces = [piece for piece in sharing.pieces[:SHOWN] if piece.saved_tokens]
    if pieces:
        heads = ("", "requests", "found by", "tokens saved")
        yield from table(heads, [_piece(piece) for piece in pieces])
    if sharing.gap.count:
        yield from _gap(sharing.gap)
    several = len({known.engine for known in sharing.working_sets}) > 1
    rows = [_working_set(known, several=several) for known in sharing.working_sets]
    yield from table(("Working set", "mean blocks", "peak", "of the pool"), rows)
    for what, rounds in (("found", sharing.found_rounds), ("missed", sharing.missed_rounds)):
        for known in rounds:
            yield from note(_round(what, known, several=several))


def _piece(piece: Stretch) -> tuple[str, ...]:
    return (
        f"Tokens {piece.begin_token:,} to {piece.end_token:,}",
        f"{piece.requests:,}",
        f"{piece.found:,}",
        f"{piece.saved_tokens:,}",
    )


def _gap(gap: Spread) -> Iterator[Line]:
    rest = f"95 % within {seconds(gap.p95_sec)}, at most {seconds(gap.max_sec)}"
    yield from row("Reuse gap", f"{seconds(gap.p50_sec)} (median)", rest)


def _working_set(known: WorkingSet, *, several: bool) -> tuple[str, ...]:
    window = "All of it" if known.window_sec is None else f"Of the last {known.window_sec:,.0f} s"
    of_pool = known.peak_blocks / known.pool_blocks if known.pool_blocks else None
    return (
        f"{window}, engine {known.engine}" if several else window,
        "n/a" if known.mean_blocks is None else f"{known.mean_blocks:,.1f}",
        f"{known.peak_blocks:,}",
        share(of_pool),
    )


def _round(what: str, known: WorkingSet, *, several: bool) -> str:
    where = f" on engine {known.engine}" if several else ""
    pool = "" if known.pool_blocks is None else f", and the pool has {known.pool_blocks:,}"
    return (
        f"What was {what}{where} came back after {seconds(known.window_sec)} (median). In such a "
        f"time up to {known.peak_blocks:,} blocks are used{pool}."
    )
