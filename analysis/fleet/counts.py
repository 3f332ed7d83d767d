# SPDX-License-Identifier: Apache-2.0
"""The figures of sessions that add up. All are whole numbers, so any order of adding is exact."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add
from typing import Any

from analysis.stats.binned import Binned
from profilemate.format.totals import BANDS


@dataclass(frozen=True)
class Counts:
    """What one session or several ones have counted.

    Of the whole run, by totals.json: ``run_ns`` (time that was recorded); ``admitted`` and
    ``admitted_hit`` (requests that were admitted, and those that found any of their prompt);
    ``query_tokens`` and ``hit_tokens`` (of the lookups that led to these admissions); ``ended``
    (requests), their ``prompt_tokens`` and ``output_tokens``; ``preemptions``; ``evicted_blocks``
    and ``never_reused_blocks``; ``band_ns`` (time of the pools in each of
    ``profilemate.format.totals.BANDS``); the histograms ``queue``, ``first_token`` and ``duration``
    (of requests that ended) and ``lifetime`` and ``idle`` (of evicted blocks).

    By the tables, which may be a window of the run: ``table_us`` (time that they cover), ``gpu_us``
    (the same, times the GPUs), ``scheduled_tokens`` (that steps had scheduled),
    ``recomputed_tokens`` (of prompts, since their blocks had been evicted for room),
    ``preemption_tokens`` (computed again since a request was preempted), ``held_us``,
    ``cached_us``, ``free_us`` (blocks of the pools that were so, times the time).

    ``windows``: sessions of which not all is in the tables.
    """

    sessions: int = 0
    windows: int = 0
    run_ns: int = 0
    admitted: int = 0
    admitted_hit: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    ended: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    evicted_blocks: int = 0
    never_reused_blocks: int = 0
    band_ns: tuple[int, ...] = (0,) * len(BANDS)
    queue: Binned = field(default_factory=Binned)
    first_token: Binned = field(default_factory=Binned)
    duration: Binned = field(default_factory=Binned)
    lifetime: Binned = field(default_factory=Binned)
    idle: Binned = field(default_factory=Binned)
    table_us: int = 0
    gpu_us: int = 0
    scheduled_tokens: int = 0
    recomputed_tokens: int = 0
    preemption_tokens: int = 0
    held_us: int = 0
    cached_us: int = 0
    free_us: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            *(_sum(getattr(self, one.name), getattr(other, one.name)) for one in fields(Counts))
        )


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, tuple):
        return tuple(map(add, one, other))
    return one + other


def merged(counts: list[Counts]) -> Counts:
    """All of these together."""
    return reduce(add, counts, Counts())
