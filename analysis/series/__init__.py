# SPDX-License-Identifier: Apache-2.0
"""What do the charts of a session show? They have the same number of points however long it is.

Each table is read once more for them. Figures that the summary has are not computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.pool.usable import block_size_of
from analysis.series import (
    block_map,
    depths,
    evictions,
    executions,
    gpu_memory,
    hit_rate,
    miss_ratio_curve,
    phases,
    pools,
    slots,
    steps,
    timeline,
)
from analysis.series.bins import Bins, of_session
from analysis.series.block_map import BlockMap, BlockMapTally
from analysis.series.depths import Depths, DepthTally
from analysis.series.evictions import EvictionRate, EvictionRateTally
from analysis.series.executions import ExecutionSeries
from analysis.series.gpu_memory import GpuSeries
from analysis.series.hit_rate import HitRate
from analysis.series.miss_ratio_curve import MissRatioCurve
from analysis.series.phases import PhaseSeries
from analysis.series.pools import PoolSeries
from analysis.series.slots import SlotSeries, SlotTally
from analysis.series.steps import StepSeries
from analysis.series.timeline import Timeline, TimelineTally
from analysis.summary import Summary
from analysis.tables.session import Session


@dataclass(frozen=True)
class Series:
    """Each part documents its values and their units. A value of each bin is one of ``bins``.
    ``slots``: None for several KV cache groups, and where no request ended."""

    bins: Bins
    pools: PoolSeries
    slots: SlotSeries | None
    eviction_rate: EvictionRate
    block_map: BlockMap | None
    hit_rate: HitRate
    depths: Depths
    timeline: Timeline
    steps: StepSeries
    phases: PhaseSeries
    executions: ExecutionSeries
    gpus: tuple[GpuSeries, ...]
    miss_ratio_curve: MissRatioCurve


def measure(session: Session, summary: Summary) -> Series:
    """The series of a session whose summary is known.

    Raises:
        SessionError: a table cannot be read.

    """
    bins = of_session(session)
    eviction_rate, map_of_blocks = _evictions(session, summary, bins)
    drawn = pools.measure(session, bins)
    shared_depths, requests, held_slots = _requests(session, summary, bins, drawn)
    return Series(
        bins=bins,
        pools=drawn,
        slots=held_slots,
        eviction_rate=eviction_rate,
        block_map=map_of_blocks,
        hit_rate=hit_rate.measure(session, bins),
        depths=shared_depths,
        timeline=requests,
        steps=steps.measure(session, bins),
        phases=phases.measure(session, bins),
        executions=executions.measure(session, bins),
        gpus=gpu_memory.measure(session, bins),
        miss_ratio_curve=miss_ratio_curve.measure(session),
    )


def _evictions(
    session: Session, summary: Summary, bins: Bins
) -> tuple[EvictionRate, BlockMap | None]:
    """Both answers of kv_cache_evictions.csv in one pass, as it is the largest table."""
    rate, drawn = EvictionRateTally(bins), _most_evicting(summary, bins)
    columns = list(dict.fromkeys((*evictions.COLUMNS, *block_map.COLUMNS)))
    for batch in session.batches("kv_cache_evictions", columns):
        rate.add(batch)
        if drawn is not None:
            drawn.add(batch)
    return rate.result(), None if drawn is None else drawn.result()


def _most_evicting(summary: Summary, bins: Bins) -> BlockMapTally | None:
    """For a map of the largest pool of the engine with the most evictions.

    None where the session does not say how many blocks it has.
    """
    by_engine = summary.evictions.by_engine
    sizes = [
        (by_engine[pool.engine].blocks, pool.end.total_blocks, -pool.engine, -pool.pool)
        for pool in summary.usage.pools
        if pool.engine in by_engine and pool.engine is not None and pool.pool is not None
    ]
    if not sizes:
        return None
    _, blocks, engine, pool = max(sizes)
    # Block 0 is the null block, which no request ever holds.
    return BlockMapTally(bins, -engine, -pool, blocks + 1)


def _requests(
    session: Session, summary: Summary, bins: Bins, blocks: PoolSeries
) -> tuple[Depths, Timeline, SlotSeries | None]:
    """All answers of requests.jsonl in one pass."""
    shared, drawn = DepthTally(), TimelineTally.of(summary.requests.ended)
    size = block_size_of(summary.facts, summary.usage)
    inside = None if size is None else SlotTally(bins, size)
    columns = list(dict.fromkeys((*depths.COLUMNS, *timeline.COLUMNS, *slots.COLUMNS)))
    for batch in session.batches("requests", columns, history=True):
        counted = batch.filter(session.in_window("requests"))
        shared.add(counted)
        drawn.add(counted)
        if inside is not None:
            # A request of the warm-up may still hold blocks after it.
            inside.add(batch)
    return shared.result(), drawn.result(), None if inside is None else inside.result(blocks)
