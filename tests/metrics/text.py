# SPDX-License-Identifier: Apache-2.0
"""Read metrics as Prometheus does, with the parser that prometheus-client has for tests of its
own."""

from __future__ import annotations

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def values(text: str, *, as_openmetrics: bool = False) -> Values:
    """Every sample by its name and labels, each once."""
    parse = (
        openmetrics.text_string_to_metric_families
        if as_openmetrics
        else text_string_to_metric_families
    )
    samples = [sample for family in parse(text) for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def total(found: Values, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    of = frozenset(labels.items())
    chosen = [value for (known, given), value in found.items() if known == name and of <= given]
    assert chosen, f"no {name} with {labels}"
    return sum(chosen)
