# SPDX-License-Identifier: Apache-2.0
"""Blocks in use, how long they lived, and how many there are: vLLM's figures and the session's."""

from __future__ import annotations

import math
from collections.abc import Iterator

import polars as pl

from analysis.engine_metrics.figures import Row, exact, row, within
from analysis.engine_metrics.moment import Seen
from analysis.engine_metrics.page import Page
from analysis.tables.facts import Facts
from analysis.tables.metadata import listed
from analysis.tables.session import Session

SAMPLE = 0.01
"""The share of its blocks that ``--kv-cache-metrics`` samples by default."""


def rows(page: Page, seen: Seen, facts: Facts) -> Iterator[Row]:
    """Usage, the histograms of evicted blocks, and the pool."""
    yield from _usage(page, seen)
    yield from _blocks(page, seen)
    yield from _pool(page, facts)


def _usage(page: Page, seen: Seen) -> Iterator[Row]:
    gauges = page.by_label("vllm:kv_cache_usage_perc", "engine")
    time, cut = pl.col("timestamp_sec"), seen.cut
    share = pl.col("num_blocks") / pl.col("total_blocks")
    states = seen.session.collect(
        "kv_cache_usage",
        lambda usage: (
            usage.filter(time <= cut)
            .group_by("engine")
            .agg(
                last=share.sort_by("timestamp_sec").last(),
                least=share.filter(time > seen.recent).min(),
                most=share.filter(time > seen.recent).max(),
            )
        ),
    )
    by_engine = {str(row["engine"]): row for row in states.iter_rows(named=True)}
    for engine, value in sorted(gauges.items()):
        state = by_engine.get(engine or "0", {})
        last, least, most = (state.get(name) for name in ("last", "least", "most"))
        parts = []
        if last is not None and least is not None and most is not None:
            parts.append(
                within(
                    "the gauge is of the last step whose results had arrived",
                    least - last,
                    most - last,
                )
            )
        name = "vllm:kv_cache_usage_perc" + (f'{{engine="{engine}"}}' if len(gauges) > 1 else "")
        yield from row(
            name,
            "share",
            value,
            last,
            parts,
            "blocks held by requests; it falls to 0 when they end, whatever is cached",
        )


def _blocks(page: Page, seen: Seen) -> Iterator[Row]:
    count = page.total("vllm:kv_block_lifetime_seconds_count")
    if count is None:
        return
    rate = _sample_rate(seen.session)
    time, cut = pl.col("timestamp_sec"), seen.cut
    moved, event = pl.col("num_blocks"), pl.col("event")
    allocated = seen.session.collect(
        "kv_cache_allocations",
        lambda rows: rows.filter(time <= cut).select(
            blocks=moved.filter(event == "allocate").sum(),
            recent=moved.filter((event == "allocate") & (time > seen.recent)).sum(),
            resets=(event == "reset").sum(),
        ),
    ).row(0, named=True)
    # The histogram does not see a reset.
    evicted = seen.session.collect(
        "kv_cache_evictions",
        lambda rows: rows.filter(pl.col("reason").cast(pl.String) != "reset").select(
            all=pl.len(),
            counted=(time <= cut).sum(),
            explicit=(pl.col("reason").cast(pl.String) == "explicit").sum(),
            lifetime=pl.col("lifetime_sec").mean(),
        ),
    ).row(0, named=True)
    pools = seen.session.collect(
        "kv_cache_usage",
        lambda rows: (
            rows.filter(time <= cut)
            .group_by("engine", "pool")
            .agg(
                used=(pl.col("num_blocks") + pl.col("cached_blocks")).max(),
                total=pl.col("total_blocks").max(),
            )
            .select(pl.col("used", "total").sum())
        ),
    ).row(0, named=True)
    # The histogram has no lifetime of a block that is allocated for the first time since a reset.
    fresh_most = min(allocated["blocks"], pools["total"] * (1 + allocated["resets"]))
    anew_least = max(0, allocated["blocks"] - fresh_most - evicted["counted"])
    anew_most = max(0, allocated["blocks"] - pools["used"] - evicted["counted"])
    anew_most += evicted["explicit"]
    error = _error(evicted["counted"] + anew_most, rate)
    later = evicted["all"] - evicted["counted"]
    note = None
    if rate < 1:
        note = f"of a sample of {100 * rate:g} % of the blocks: its spread is two standard errors"
    yield from row(
        "vllm:kv_block_lifetime_seconds_count",
        "blocks",
        count,
        float(evicted["all"]),
        [
            exact("blocks that were evicted after the page was taken", -float(later)),
            within(
                "blocks that were allocated right before it, if not yet counted",
                -float(allocated["recent"]),
                0.0,
            ),
            within(
                f"evicted blocks that are not in the sample of {100 * rate:g} %",
                -(1 - rate) * evicted["counted"] - error,
                -(1 - rate) * evicted["counted"] + error,
            ),
            within(
                "blocks without content that were allocated again: the histogram takes them for "
                "evicted",
                rate * anew_least,
                rate * anew_most,
            ),
        ],
        note,
    )
    total = page.total("vllm:kv_block_lifetime_seconds_sum")
    if total is not None and count:
        yield from _mean(total / count, evicted["lifetime"], anew_most, "lifetime", rate)
    idle = page.total("vllm:kv_block_idle_before_evict_seconds_sum")
    if idle is not None and count:
        mean = seen.session.collect(
            "kv_cache_evictions",
            lambda rows: rows.filter(pl.col("reason").cast(pl.String) != "reset").select(
                pl.col("idle_sec").mean()
            ),
        ).item()
        yield from _mean(idle / count, mean, anew_most, "idle_before_evict", rate)


def _mean(vllm: float, session: float | None, anew: int, name: str, rate: float) -> Iterator[Row]:
    """A mean of the histogram. It is one of other blocks, so it has no difference."""
    mixed = f"has up to {anew:,} blocks without content in it" if anew else ""
    sample = f"is of a sample of {100 * rate:g} %" if rate < 1 else ""
    others = " and ".join(filter(None, [mixed, sample]))
    of = "no evicted block" if session is None else "every evicted block"
    yield Row(
        f"vllm:kv_block_{name}_seconds, mean",
        "s",
        vllm if math.isfinite(vllm) else None,
        session,
        None,
        (),
        None,
        "not comparable",
        f"the session's is of {of}" + (f"; vLLM's {others}" if others else ""),
    )


def _error(blocks: float, rate: float) -> float:
    """Two standard errors of the number of blocks in a sample of so many."""
    return 2 * math.sqrt(blocks * rate * (1 - rate))


def _sample_rate(session: Session) -> float:
    """The value of ``--kv-cache-metrics-sample`` on the command line, or its default."""
    words = [str(word).replace("_", "-") for word in listed(session.metadata.get("argv"))]
    given = None
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == "--kv-cache-metrics-sample":
            given = value if equals else next(iter(words[at + 1 : at + 2]), None)
    try:
        rate = float(given) if given is not None else SAMPLE
    except ValueError:
        return SAMPLE
    return rate if 0 < rate <= 1 else SAMPLE


def _pool(page: Page, facts: Facts) -> Iterator[Row]:
    blocks = page.label("vllm:cache_config_info", "num_gpu_blocks")
    if blocks and blocks.isdigit() and facts.pool_blocks is not None:
        yield from row(
            "vllm:cache_config_info{num_gpu_blocks}",
            "blocks",
            float(blocks),
            float(facts.pool_blocks),
            [],
        )
