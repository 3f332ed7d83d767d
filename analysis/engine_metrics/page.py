# SPDX-License-Identifier: Apache-2.0
"""Which figures does a page of vLLM's metrics have?

The page is text in Prometheus' format, and prometheus_client parses it. There the names of
counters end in ``_total``, and those of histograms in ``_count`` and ``_sum``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from analysis.errors import SessionError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_VLLM = "vllm:"


@dataclass(frozen=True)
class Sample:
    """A value with its labels."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Page:
    """A page of metrics. ``source``: where it comes from. ``scraped_at``: when it was taken, in
    seconds since 1970; None where that is not known. ``samples``: by metric."""

    source: str
    scraped_at: float | None
    samples: Mapping[str, tuple[Sample, ...]]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum, over all engines, of the samples with this name and these labels; None where
        there is none. ``name`` is a counter's, or that of a histogram's count or sum."""
        found = self._of(name, labels)
        return sum(sample.value for sample in found) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The sum of the samples with this name, for each value of a label."""
        sums: dict[str, float] = {}
        for sample in self.samples.get(name, ()):
            value = sample.labels.get(label, "")
            sums[value] = sums.get(value, 0.0) + sample.value
        return sums

    def label(self, name: str, label: str) -> str | None:
        """The value of a label in the first sample with this name. It is for metrics that have
        facts in their labels, such as ``vllm:cache_config_info``."""
        return next((sample.labels.get(label) for sample in self.samples.get(name, ())), None)

    def _of(self, name: str, labels: Mapping[str, str]) -> list[Sample]:
        return [
            sample
            for sample in self.samples.get(name, ())
            if labels.items() <= sample.labels.items()
        ]


def parse(text: str, source: str, scraped_at: float | None = None) -> Page:
    """Read a page of metrics.

    Args:
        text: the page.
        source: where it comes from.
        scraped_at: when it was taken, in seconds since 1970; None where that is not known.

    Raises:
        SessionError: the text is no page of metrics, or has no metric of vLLM's.

    """
    # The rest of the analyzer works without this package.
    from prometheus_client.parser import text_string_to_metric_families

    try:
        samples = _samples(text_string_to_metric_families(text))
    except (ValueError, IndexError, KeyError) as error:
        said = " ".join(str(error).split())[:200]
        raise SessionError(f"{source} is not a page of Prometheus metrics: {said}") from None
    if not any(name.startswith(_VLLM) for name in samples):
        raise SessionError(f"{source} has no metric of vLLM's: {_other_prefix(samples)}")
    return Page(source, scraped_at, samples)


def _other_prefix(samples: Iterable[str]) -> str:
    """Why no metric is known: what stands in the prefix's place, or that there is nothing."""
    for name in sorted(samples):
        found = re.match(r"(\w*:)?(\w*_)?vllm[:_]", name)
        if found is not None:
            return (
                f"they begin with {found[0]} here ({name}), and vLLM's own with {_VLLM}; another "
                "program has renamed them. Name the /metrics of the vLLM server itself"
            )
    return (
        f"none begins with {_VLLM}; name the server's /metrics, such as "
        "http://localhost:8000/metrics"
    )


def _samples(families: Iterable[Metric]) -> dict[str, tuple[Sample, ...]]:
    found: dict[str, list[Sample]] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, []).append(Sample(sample.labels, float(sample.value)))
    return {name: tuple(samples) for name, samples in found.items()}
