# SPDX-License-Identifier: Apache-2.0
"""What did waste cost, at so much for an hour of a GPU?

Nobody measures a cost: it is derived from shares that were measured. A token that was computed
again is taken to cost as much time as any other token that a step had scheduled, and a GPU to be
worth as much as its KV cache is used. The parts overlap: a GPU computes tokens again while a part
of its pool is idle. So they have no sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.fleet.counts import Counts


@dataclass(frozen=True)
class Item:
    """One derived cost. ``part`` of ``whole`` (in ``unit``) were wasted; ``gpu_hours`` is that
    share of the bill's hours, and ``cost`` that many hours at the bill's price."""

    name: str
    unit: str
    part: float
    whole: float
    gpu_hours: float
    cost: float


@dataclass(frozen=True)
class Bill:
    """``gpu_hours``: of the tables, which may be windows of their runs: the GPUs of each session,
    times the time that its tables cover. ``gpu_hour``: the price of one. ``cost``: of all."""

    gpu_hour: float
    gpu_hours: float
    cost: float
    items: tuple[Item, ...]


RECOMPUTED, PREEMPTED, IDLE = "recomputed tokens", "preemption tax", "idle KV"


def bill(counts: Counts, gpu_hour: float) -> Bill:
    """The bill of these sessions, at ``gpu_hour`` for each hour of a GPU."""
    hours = counts.gpu_us / 3.6e9
    unheld = counts.cached_us + counts.free_us
    scheduled = counts.scheduled_tokens

    def item(name: str, unit: str, part: float, whole: float) -> Item:
        wasted = hours * part / whole if whole else 0.0
        return Item(name, unit, part, whole, wasted, wasted * gpu_hour)

    return Bill(
        gpu_hour=gpu_hour,
        gpu_hours=hours,
        cost=hours * gpu_hour,
        items=(
            item(RECOMPUTED, "tokens", counts.recomputed_tokens, scheduled),
            item(PREEMPTED, "tokens", counts.preemption_tokens, scheduled),
            item(IDLE, "block-hours", unheld / 3.6e9, (counts.held_us + unheld) / 3.6e9),
        ),
    )
