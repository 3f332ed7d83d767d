# SPDX-License-Identifier: Apache-2.0
"""What was evicted, how long it had lived, and whether it was a loss."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.pool.evictions import Evicted, Evictions, Regret, Reused
from analysis.pool.kv_groups import Contents
from analysis.pool.lifetimes import Lifetimes
from analysis.prefix.ages import Ages
from analysis.renderers.text.layout import Line, note, row, table
from analysis.stats.spread import Spread
from analysis.summary import Summary
from analysis.wording.formats import counted, seconds, share
from analysis.wording.misses import LOST


def lines(summary: Summary) -> Iterator[Line]:
    evictions = summary.evictions
    if not evictions.total.blocks:
        yield from note("No cached block was evicted.")
    else:
        yield from _counted(evictions)
        yield ()
        if summary.lifetimes.lifetime.count:
            yield from _lifetimes(summary.lifetimes)
        yield from _loss(evictions)
        yield from _ages(summary.ages)
    if summary.groups:
        yield from _groups(summary.groups)


def _counted(evictions: Evictions) -> Iterator[Line]:
    split = [*evictions.by_reason.items(), *evictions.by_origin.items()]
    rows = [
        _evicted("All", evictions.total),
        *(_evicted(name.capitalize(), evicted) for name, evicted in split),
    ]
    if len(evictions.by_engine) > 1:
        rows += [_evicted(f"Engine {rank}", part) for rank, part in evictions.by_engine.items()]
    yield from table(("", "blocks", "never reused", "copies left"), rows)
    yield from note(
        "Never reused: no request ever found the block. Copies left: another block still held "
        "the same content, so nothing was lost."
    )


def _evicted(name: str, evicted: Evicted) -> tuple[str, ...]:
    def of_all(blocks: int) -> str:
        return f"{blocks:,} ({100 * blocks / evicted.blocks:.1f} %)"

    return (
        name,
        f"{evicted.blocks:,}",
        of_all(evicted.never_reused),
        of_all(evicted.copies_left),
    )


def _lifetimes(lifetimes: Lifetimes) -> Iterator[Line]:
    rows = [
        _spread("Lifetime", lifetimes.lifetime),
        _spread("Idle before", lifetimes.idle),
        _spread("Without a holder", lifetimes.evictable),
    ]
    yield from table(("", "mean", "median", "95th pct.", "99th pct.", "max"), rows)


def _spread(name: str, spread: Spread) -> tuple[str, ...]:
    figures = (spread.mean_sec, spread.p50_sec, spread.p95_sec, spread.p99_sec, spread.max_sec)
    return (name, *map(seconds, figures))


def _loss(evictions: Evictions) -> Iterator[Line]:
    rate, regretted = evictions.rate, evictions.regretted
    if rate.mean_per_sec is not None and rate.peak_sec is not None:
        most = f"most {rate.peak_per_sec:,} in the second from {rate.peak_sec:,.0f} s on"
        yield from row("Rate", f"{rate.mean_per_sec:,.1f} blocks a second", most)
    if regretted.blocks:
        yield from _again("Regretted", regretted)
    for reason, lost in evictions.on_purpose.items():
        yield from _again(LOST[reason], lost)
    yield from row("Harmless", f"{evictions.harmless:,}", "that nobody asked for again")
    dead = evictions.total.never_reused
    if dead:
        yield from row("Dead on arrival", counted(dead, "block"), _dead(evictions))
    counts = ", ".join(map(_reused, evictions.reuse_counts))
    yield from row("Times reused", counts)


def _again(label: str, lost: Regret) -> Iterator[Line]:
    again = (
        f"asked for again by {counted(lost.requests, 'request')}, half of them within "
        f"{seconds(lost.after.p50_sec)}; {lost.recomputed_tokens:,} tokens were computed again"
    )
    yield from row(label, f"{lost.blocks:,} ({share(lost.share)})", again)


def _dead(evictions: Evictions) -> str:
    def part(name: str, evicted: Evicted) -> str:
        tokens = evicted.never_reused_tokens
        room = "" if tokens is None else f" ({tokens:,} tokens)"
        return f"{evicted.never_reused:,} of {name}{room}"

    parts = [part(name, evicted) for name, evicted in evictions.by_origin.items()]
    return f"never reused: {', '.join(parts)}"


def _reused(reused: Reused) -> str:
    times = f"{reused.least}"
    if reused.most is None:
        times += " or more"
    elif reused.most > reused.least:
        times += f" to {reused.most}"
    return f"{times}: {counted(reused.blocks, 'block')}"


def _ages(ages: Ages) -> Iterator[Line]:
    if ages.later is None or not ages.reuses:
        return
    later = (
        f"of {counted(ages.reuses, 'block')} asked for again came back after more than "
        f"{seconds(ages.at_eviction.p50_sec)}, when half of the evicted blocks had gone"
    )
    yield from row("Back too late", share(ages.later_share), later)
    if ages.at_hit.count:
        yield from note(
            f"Blocks that were found came back after {seconds(ages.at_hit.p50_sec)} (median), "
            f"95 % of them within {seconds(ages.at_hit.p95_sec)}."
        )
    hit, evicted = ages.at_hit_requests, ages.at_eviction_requests
    if hit.p50 is not None and evicted.p50 is not None:
        yield from note(
            f"In requests that came meanwhile: found again after {hit.p50:,} (median; 95 % within "
            f"{hit.p95:,}), evicted after {evicted.p50:,} (median)."
        )


def _groups(groups: tuple[Contents, ...]) -> Iterator[Line]:
    yield ()
    rows = [
        (
            f"Group {contents.group}: {contents.kind or 'unknown'}",
            f"{contents.cached:,}",
            f"{contents.evicted:,}",
            f"{contents.left:,}",
            share(contents.share),
        )
        for contents in groups
    ]
    yield from table(("", "cached", "evicted", "left", "of contents"), rows)
