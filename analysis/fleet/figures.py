# SPDX-License-Identifier: Apache-2.0
"""What do counts come to: the rates, shares and quantiles of a session, a replica or a fleet?"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.fleet.counts import Counts
from analysis.stats.binned import Quantile


@dataclass(frozen=True)
class Figures:
    """Shares are from 0 to 1. A figure of which there is nothing is None.

    ``recorded_hours``: of all sessions together. ``requests_per_sec`` and
    ``output_tokens_per_sec``: of one session, on average over the time. ``hit_rate``: prompt tokens
    found, of all of admitted requests. ``request_hit_rate``: admitted requests that found any.
    ``eviction_tax`` and ``preemption_tax``: tokens that were computed again, because their blocks
    had been evicted for room or their request had been preempted, of all tokens that steps had
    scheduled. ``preemptions_per_request``: of those that ended. ``usage``: blocks that requests
    held, of all blocks, mean over time; ``cached`` and ``free``: the rest. ``over_90``: the time
    with usage over 90 %. The quantiles are of requests that ended (``queue``, ``first_token``,
    ``duration``, from the arrival) and of evicted blocks (``lifetime``, ``idle``).
    """

    recorded_hours: float
    requests_per_sec: float | None
    output_tokens_per_sec: float | None
    hit_rate: float | None
    request_hit_rate: float | None
    eviction_tax: float | None
    preemption_tax: float | None
    preemptions_per_request: float | None
    usage: float | None
    cached: float | None
    free: float | None
    over_90: float | None
    queue_p50: Quantile | None
    queue_p95: Quantile | None
    first_token_p50: Quantile | None
    first_token_p95: Quantile | None
    duration_p50: Quantile | None
    duration_p95: Quantile | None
    lifetime_p50: Quantile | None
    idle_p50: Quantile | None


def of_counts(counts: Counts) -> Figures:
    """The figures that these counts come to."""
    seconds = counts.run_ns / 1e9
    blocks_us = counts.held_us + counts.cached_us + counts.free_us
    return Figures(
        recorded_hours=seconds / 3600,
        requests_per_sec=_share(counts.ended, seconds),
        output_tokens_per_sec=_share(counts.output_tokens, seconds),
        hit_rate=_share(counts.hit_tokens, counts.query_tokens),
        request_hit_rate=_share(counts.admitted_hit, counts.admitted),
        eviction_tax=_share(counts.recomputed_tokens, counts.scheduled_tokens),
        preemption_tax=_share(counts.preemption_tokens, counts.scheduled_tokens),
        preemptions_per_request=_share(counts.preemptions, counts.ended),
        usage=_share(counts.held_us, blocks_us),
        cached=_share(counts.cached_us, blocks_us),
        free=_share(counts.free_us, blocks_us),
        over_90=_share(counts.band_ns[-1], sum(counts.band_ns)),
        queue_p50=counts.queue.quantile(50),
        queue_p95=counts.queue.quantile(95),
        first_token_p50=counts.first_token.quantile(50),
        first_token_p95=counts.first_token.quantile(95),
        duration_p50=counts.duration.quantile(50),
        duration_p95=counts.duration.quantile(95),
        lifetime_p50=counts.lifetime.quantile(50),
        idle_p50=counts.idle.quantile(50),
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
