# SPDX-License-Identifier: Apache-2.0
"""What a benchmark found, and how it compares with the target and with an earlier result."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

SMALLEST_CHANGE = 0.01
"""A share of the figure: less is no change, however closely measurements agree."""


class BenchmarkError(Exception):
    """Nothing could be measured; the text says why and what to do."""


@dataclass(frozen=True)
class Target:
    """What is aimed for: at most (``lower`` is better) or at least (``higher``) the bound."""

    bound: float
    better: Literal["lower", "higher"] = "lower"
    words: str = ""
    """What to call the bound, where the number and the unit say too little."""

    def met_by(self, figure: float) -> bool:
        return figure <= self.bound if self.better == "lower" else figure >= self.bound


@dataclass(frozen=True)
class Result:
    """One figure with its spread, from ``low`` to ``high``, all in ``unit``.

    Without a ``figure`` it could not be measured, and the ``note`` says why. Without a
    ``target`` it is there for comparison.
    """

    name: str
    figure: float | None
    low: float
    high: float
    unit: str
    target: Target | None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, known: dict[str, Any]) -> Result:
        target = known["target"]
        return cls(**{**known, "target": Target(**target) if target else None})


def unmeasured(name: str, why: str, target: Target | None = None, unit: str = "") -> Result:
    """A row for what could not be measured."""
    return Result(name, None, 0.0, 0.0, unit, target, why)


def middle(name: str, figures: list[float], unit: str, target: Target | None, note: str) -> Result:
    """The median of repeated measurements, with all of them as the spread."""
    ordered = sorted(figures)
    half = len(ordered) // 2
    median = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return Result(name, median, ordered[0], ordered[-1], unit, target, note)


def verdict(now: Result, before: Result | None) -> str:
    """``met`` or ``missed``, and whether it moved by more than both spreads since ``before``."""
    if now.figure is None:
        return "not measured"
    if now.target is None:
        return "for comparison"
    words = "met" if now.target.met_by(now.figure) else "missed"
    change = moved(now, before)
    return f"{words}, {change}" if change else words


def moved(now: Result, before: Result | None) -> Literal["", "better", "worse"]:
    """How the figure changed; empty where the spreads overlap or there is nothing to compare."""
    if now.figure is None or now.target is None or before is None or before.figure is None:
        return ""
    if now.unit != before.unit:
        return ""
    overlap = now.low <= before.high and before.low <= now.high
    if overlap or abs(now.figure - before.figure) <= SMALLEST_CHANGE * abs(before.figure):
        return ""
    lower = now.high < before.low
    return "better" if lower == (now.target.better == "lower") else "worse"
