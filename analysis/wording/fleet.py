# SPDX-License-Identifier: Apache-2.0
"""What is said of a fleet, the same in every renderer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from analysis.fleet.merging import Fleet, One
from analysis.fleet.money import IDLE, Bill, Item
from analysis.fleet.outliers import Outlier
from analysis.fleet.routing import Routing
from analysis.stats.binned import Quantile
from analysis.wording.formats import counted, number, seconds, share
from analysis.wording.measures import figure

NAMES: Mapping[str, str] = {
    "requests_per_sec": "requests a second",
    "hit_rate": "hit rate",
    "eviction_tax": "eviction tax",
    "preemption_tax": "preemption tax",
    "usage": "mean usage",
    "queue_p95": "95th percentile of the time in the queue",
    "first_token_p50": "median time to the first token",
    "duration_p50": "median time to the end",
}
"""Of the measures by which replicas are compared."""

NOTHING_JOINED = (
    "Not known: no two sessions have contents that compare. Record all replicas with the same "
    "VLLM_PROFILING_CONTENT_KEY."
)
ALL_ALIKE = "None: of each figure, no replica is far from the median of those like it."
TOO_FEW = "Not known: that takes four replicas of one model and deployment at least."
DERIVED = (
    "Derived, not measured: as if each token took the same time, and a GPU were worth what its "
    "pool is used for. The parts overlap, so they have no sum."
)


def hours(value: float) -> str:
    return f"{value:,.2f} h" if value >= 0.01 else seconds(3600 * value)


def quantile(found: Quantile | None) -> str:
    """The estimate. In the first bin, which begins at 0, its bound: it may be far below."""
    if found is not None and not found.low_sec and found.high_sec is not None:
        return f"< {_plain(found.high_sec)}"
    return seconds(None if found is None else found.sec)


def bounds(found: Quantile | None) -> str:
    """The estimate, and between what the quantile lies."""
    if found is None:
        return "n/a"
    if found.high_sec is None:
        return f"{seconds(found.low_sec)} or more"
    if not found.low_sec:
        return quantile(found)
    return f"{seconds(found.sec)} ({_plain(found.low_sec)} to {_plain(found.high_sec)})"


def _plain(sec: float) -> str:
    return f"{sec * 1e3:g} ms" if 0 < sec < 1 else f"{sec:g} s"


def title(found: Fleet) -> str:
    sessions, replicas = found.whole.counts.sessions, found.whole.replicas
    return f"{counted(sessions, 'session')} of {counted(replicas, 'replica')}"


def standing_out(one: Outlier) -> str:
    """A sentence on a replica that stands out."""
    name = NAMES[one.measure]
    among = f"{one.peers} replicas" + (f" of {one.model}" if one.model else "")
    far = (
        f", {one.distance:.1f} deviations away"
        if one.distance is not None
        else ", where most are alike"
    )
    return (
        f"{one.replica}: {name} {_value(one, one.value)}, the median of {among} is "
        f"{_value(one, one.median)} (MAD {_value(one, one.mad)}{far}). "
        f"{one.session} shows it: {_value(one, one.session_value)}."
    )


def _value(one: Outlier, value: float) -> str:
    return figure(value, one.unit)


def routing(found: Routing) -> Iterator[str]:
    """Sentences on what replicas had to compute although another one had it."""
    if not found.joined:
        yield NOTHING_JOINED
        for reason in found.because:
            yield f"Why: {reason}."
        return
    yield (
        f"{number(found.routed_tokens)} of {number(found.query_tokens)} prompt tokens were "
        "computed although another replica had them, and all before them, at that moment; "
        f"{number(found.shared_tokens)} although the replicas together had them."
    )
    yield (
        "Neither changes what was in the caches: no run was simulated. Moments of different hosts "
        "are compared by their wall clocks."
    )
    if found.apart:
        yield f"{counted(found.apart, 'session')} left out: no other one has contents of its key."


def arithmetic(bill: Bill, item: Item) -> str:
    """How an item came about."""
    return (
        f"{_wasted(item, item.part)} / {_wasted(item, item.whole)} {item.unit} x "
        f"{amount(bill.gpu_hours)} GPU-hours = {amount(item.gpu_hours)} GPU-hours; "
        f"x {bill.gpu_hour:g} = {amount(item.cost)}"
    )


def amount(value: float) -> str:
    """Hours or money: with two decimals, and as many more as three digits take."""
    if not value or value >= 1:
        return f"{value:,.2f}"
    return f"{value:.{min(6, 2 - math.floor(math.log10(value)))}f}"


def _wasted(item: Item, value: float) -> str:
    if item.name != IDLE:
        return number(value)
    return f"{value:,.1f}" if value >= 100 else amount(value)


def state(one: One) -> str:
    """What is to be known of a session beside its figures; empty where nothing is."""
    said = [] if one.origin.state == "complete" else [one.origin.state]
    return "; ".join([*said, *one.warnings])


def windows(found: Fleet) -> str | None:
    """A note on sessions of which not all tables are there."""
    count = found.whole.counts.windows
    if not count:
        return None
    return (
        f"Of {counted(count, 'session')} the tables are a window of the run. Usage, what was "
        "computed again, and what that cost are of the windows; all else is of the whole runs."
    )


def rate(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.2f}/s"


def taxes(eviction: float | None, preemption: float | None) -> str:
    return f"{share(eviction)}, {share(preemption)}"
