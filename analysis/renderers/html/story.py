# SPDX-License-Identifier: Apache-2.0
"""What happened, in a few sentences and figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from analysis.renderers.formats import duration, percent, seconds, share
from analysis.summary import Summary


@dataclass(frozen=True)
class Figure:
    """One figure of the summary: ``key`` is where ``profilemate summary --json`` has it."""

    label: str
    key: str
    value: float | None
    text: str


def sentences(summary: Summary) -> Iterator[str]:
    """The story, the most telling first."""
    yield from _usage(summary)
    yield from _prefix_cache(summary)
    yield from _evictions(summary)
    yield from _requests(summary)


def figures(summary: Summary) -> Iterator[Figure]:
    """The figures to remember."""
    usage, true, evicted = (
        summary.usage.combined,
        summary.prefix_cache.true,
        summary.evictions.total,
    )
    if usage is not None:
        key = "usage.combined"
        yield Figure("mean usage", f"{key}.mean_pct", usage.mean_pct, percent(usage.mean_pct))
        yield Figure("peak usage", f"{key}.peak_pct", usage.peak_pct, percent(usage.peak_pct))
        if usage.bands is not None:
            over = usage.bands.over_90
            yield Figure("of the time over 90 %", f"{key}.bands.over_90", over, share(over))
    rate = true.token_rate
    yield Figure("of prompt tokens cached", "prefix_cache.true.token_rate", rate, share(rate))
    yield _count("blocks evicted", "evictions.total.blocks", evicted.blocks)
    half = summary.lifetimes.lifetime.p50_sec
    if half is not None:
        yield Figure("median lifetime", "lifetimes.lifetime.p50_sec", half, seconds(half))
    yield _count("requests ended", "requests.ended", summary.requests.ended)
    yield _count("preemptions", "preemptions.count", summary.preemptions.count)


def _count(label: str, key: str, value: int) -> Figure:
    return Figure(label, key, value, f"{value:,}")


def _usage(summary: Summary) -> Iterator[str]:
    usage = summary.usage.combined
    length = duration(summary.session.duration_sec - summary.session.begin_sec)
    if usage is None or usage.bands is None:
        yield f"In {length}, no block of the KV cache was ever held."
        return
    pools = "the KV cache" if len(summary.usage.pools) == 1 else "the engines' KV caches"
    yield (
        f"Over {length}, {pools} had {percent(usage.mean_pct)} of its blocks in use on average, "
        f"{percent(usage.peak_pct)} at the peak, and over 90 % for {share(usage.bands.over_90)} of "
        "the time."
    )


def _prefix_cache(summary: Summary) -> Iterator[str]:
    true = summary.prefix_cache.true
    if summary.facts.prefix_caching is False:
        yield "Prefix caching was off, so every prompt was computed in full."
    elif true.query_tokens:
        yield (
            f"{share(true.token_rate)} of all prompt tokens came out of the prefix cache "
            f"({true.hit_tokens:,} of {true.query_tokens:,}); {true.requests_hit:,} of "
            f"{true.requests:,} requests found some of their prompt."
        )


def _evictions(summary: Summary) -> Iterator[str]:
    evicted, lifetime = summary.evictions.total, summary.lifetimes.lifetime
    if not evicted.blocks:
        yield "No cached block was evicted."
        return
    never = share(evicted.never_reused / evicted.blocks)
    half = "" if lifetime.p50_sec is None else f", half of them within {seconds(lifetime.p50_sec)}"
    yield (
        f"{evicted.blocks:,} cached blocks were evicted{half}; {never} of them no request had ever "
        "found."
    )


def _requests(summary: Summary) -> Iterator[str]:
    requests, admission = summary.requests, summary.admission
    aborted = f" ({requests.aborted:,} of them aborted)" if requests.aborted else ""
    yield (
        f"{requests.ended:,} requests ended{aborted}, and running ones were preempted "
        f"{summary.preemptions.count:,} times."
    )
    if admission.too_large:
        yield (
            f"{admission.too_large:,} requests can never run: they need more blocks than there are."
        )
