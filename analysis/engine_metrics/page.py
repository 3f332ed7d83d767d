# SPDX-License-Identifier: Apache-2.0
"""What does a page of vLLM's metrics say?

The page is text in Prometheus' format, which prometheus_client parses. Names of counters end in
``_total`` there, those of histograms in ``_count`` and ``_sum``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from analysis.errors import SessionError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_VLLM = "vllm:"


@dataclass(frozen=True)
class Sample:
    """A value and its labels."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Page:
    """A page of metrics: ``samples`` by name. ``source``: where it is from. ``scraped_at``: when it
    was taken, in seconds since 1970; None where that is not known."""

    source: str
    scraped_at: float | None
    samples: Mapping[str, tuple[Sample, ...]]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of the samples with this name and these labels, over all engines; None without
        any. The name is that of a counter, or of a histogram's count or sum."""
        found = self._of(name, labels)
        return sum(sample.value for sample in found) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums of the samples with this name, by the value of a label."""
        sums: dict[str, float] = {}
        for sample in self.samples.get(name, ()):
            value = sample.labels.get(label, "")
            sums[value] = sums.get(value, 0.0) + sample.value
        return sums

    def label(self, name: str, label: str) -> str | None:
        """A label of the first sample: some metrics have nothing but facts in their labels."""
        return next((sample.labels.get(label) for sample in self.samples.get(name, ())), None)

    def _of(self, name: str, labels: Mapping[str, str]) -> list[Sample]:
        return [
            sample
            for sample in self.samples.get(name, ())
            if labels.items() <= sample.labels.items()
        ]


def parse(text: str, source: str, scraped_at: float | None = None) -> Page:
    """Read a page of metrics.

    Raises:
        SessionError: the text is no such page, or has no metric of vLLM's.

    """
    # Nothing else of the analyzer needs it.
    from prometheus_client.parser import text_string_to_metric_families

    try:
        samples = _samples(text_string_to_metric_families(text))
    except (ValueError, IndexError, KeyError) as error:
        said = " ".join(str(error).split())[:200]
        raise SessionError(f"{source} is not a page of Prometheus metrics: {said}") from None
    if not any(name.startswith(_VLLM) for name in samples):
        raise SessionError(
            f"{source} has no metric of vLLM's (none begins with {_VLLM}); name the server's "
            "/metrics, such as http://localhost:8000/metrics"
        )
    return Page(source, scraped_at, samples)


def _samples(families: Iterable[Metric]) -> dict[str, tuple[Sample, ...]]:
    found: dict[str, list[Sample]] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, []).append(Sample(sample.labels, float(sample.value)))
    return {name: tuple(samples) for name, samples in found.items()}
