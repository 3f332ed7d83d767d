# SPDX-License-Identifier: Apache-2.0
"""The text that Prometheus reads, of the totals of a run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, cast

from prometheus_client import core, exposition
from prometheus_client.openmetrics import exposition as openmetrics

from profilemate.format.totals import REUSES, Histogram, RunTotals
from profilemate.metrics.catalogue import METRICS, Metric

_UNITS = ("seconds", "bytes", "ratio")


class _Run:
    """What prometheus-client asks for its metrics."""

    def __init__(self, found: RunTotals) -> None:
        self._found = found

    def collect(self) -> Iterator[core.Metric]:
        """All of them, in the catalogue's order."""
        return (_family(metric, self._found) for metric in METRICS)


def render(found: RunTotals, *, as_openmetrics: bool = False) -> bytes:
    """The metrics as text, in Prometheus's own format or in that of OpenMetrics."""
    generate = openmetrics.generate_latest if as_openmetrics else exposition.generate_latest
    text: bytes = generate(_Run(found))
    return text


def content_type(*, as_openmetrics: bool) -> str:
    """The format's name in HTTP."""
    of = openmetrics if as_openmetrics else exposition
    return str(of.CONTENT_TYPE_LATEST)


def _family(metric: Metric, found: RunTotals) -> core.Metric:
    kinds: dict[str, Any] = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    if metric.kind == "info":
        info = core.InfoMetricFamily(metric.name, metric.about)
        for labels, _ in metric.samples(found):
            info.add_metric([], dict(zip(metric.labels, labels, strict=True)))
        return info
    unit = next((unit for unit in _UNITS if metric.name.endswith(f"_{unit}")), "")
    family = kinds[metric.kind](metric.name, metric.about, labels=metric.labels, unit=unit)
    for labels, value in metric.samples(found):
        if isinstance(value, dict):
            family.add_metric(labels, *_buckets(value))
        else:
            family.add_metric(labels, value)
    return cast(core.Metric, family)


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Prometheus's buckets, which hold all values up to a bound, and the sum."""
    is_time = histogram["bounds"] != list(REUSES)
    unit = 1e9 if is_time else 1
    # Below 4 reuses is up to 3.
    bounds = [bound / unit if is_time else float(bound - 1) for bound in histogram["bounds"]]
    names = [*map(str, bounds), "+Inf"]
    below = list(accumulate(histogram["counts"]))
    return list(zip(names, below, strict=True)), histogram["sum"] / unit
