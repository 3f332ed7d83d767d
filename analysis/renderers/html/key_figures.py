# SPDX-License-Identifier: Apache-2.0
"""The figures to remember of a session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from analysis.summary import Summary
from analysis.wording.formats import percent, seconds, share


@dataclass(frozen=True)
class KeyFigure:
    """One figure of the summary: ``key`` is where ``profilemate summary --json`` has it."""

    label: str
    key: str
    value: float | None
    text: str


def figures(summary: Summary) -> Iterator[KeyFigure]:
    """A few, in the order of the page."""
    usage, true, evicted = (
        summary.usage.combined,
        summary.prefix_cache.true,
        summary.evictions.total,
    )
    if usage is not None:
        key = "usage.combined"
        yield KeyFigure("mean usage", f"{key}.mean_pct", usage.mean_pct, percent(usage.mean_pct))
        yield KeyFigure("peak usage", f"{key}.peak_pct", usage.peak_pct, percent(usage.peak_pct))
        if usage.bands is not None:
            over = usage.bands.over_90
            yield KeyFigure("of the time over 90 %", f"{key}.bands.over_90", over, share(over))
    rate = true.token_rate
    yield KeyFigure(
        "of prompt tokens found in the cache", "prefix_cache.true.token_rate", rate, share(rate)
    )
    ceiling = summary.misses.ceiling
    if ceiling is not None:
        key = "misses.ceiling"
        yield KeyFigure("of prompt tokens at most could have been", key, ceiling, share(ceiling))
    yield _count("blocks evicted", "evictions.total.blocks", evicted.blocks)
    recomputed = summary.misses.recomputed_tokens
    yield _count("tokens recomputed after eviction", "misses.recomputed_tokens", recomputed)
    half = summary.lifetimes.lifetime.p50_sec
    if half is not None:
        yield KeyFigure("median lifetime", "lifetimes.lifetime.p50_sec", half, seconds(half))
    yield _count("requests ended", "requests.ended", summary.requests.ended)
    yield _count("preemptions", "preemptions.count", summary.preemptions.count)
    coverage = summary.cuda_graphs.execution_share
    if coverage is not None:
        key = "cuda_graphs.execution_share"
        yield KeyFigure("of executions in a CUDA graph", key, coverage, share(coverage))


def _count(label: str, key: str, value: int) -> KeyFigure:
    return KeyFigure(label, key, value, f"{value:,}")
