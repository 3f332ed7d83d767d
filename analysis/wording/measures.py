# SPDX-License-Identifier: Apache-2.0
"""The values of measures as people read them, by their unit."""

from __future__ import annotations

from collections.abc import Callable

from analysis.wording.formats import byte_size, percent, seconds, share

NOTHING_DIFFERS = "Nothing that was recorded: two sessions of one configuration differ like this."
"""Of two sessions' configurations."""

NONE = "-"


def figure(value: float | None, unit: str) -> str:
    """A value, rounded for reading."""
    known: dict[str, Callable[[float], str]] = {
        "share": share,
        "%": percent,
        "s": seconds,
        "bytes": byte_size,
    }
    return NONE if value is None else known.get(unit, _number)(value)


def exact(value: float, unit: str) -> str:
    """A value beside a limit: with six digits, so that it does not seem to equal the limit."""
    shown, mark = (100 * value, "%") if unit == "share" else (value, unit)
    return f"{shown:.6g} {mark}" if mark in ("%", "s") else f"{_whole(value) or f'{shown:.6g}'}"


def change(absolute: float | None, relative: float | None, unit: str) -> str:
    """The change in the measure's unit; of percentages, in points."""
    if absolute is None:
        return ""
    if _is_none(absolute, relative):
        return "none"
    sign = "-" if absolute < 0 else "+"
    size = abs(absolute)
    if unit in ("share", "%"):
        return f"{sign}{100 * size if unit == 'share' else size:.2f} points"
    return f"{sign}{figure(size, unit)}"


def relative_change(absolute: float | None, relative: float | None) -> str:
    """The change as a share of the baseline's value; empty where there is no change."""
    if relative is None or _is_none(absolute, relative):
        return ""
    per_cent = 100 * relative
    return f"{per_cent:+,.1f} %" if abs(per_cent) >= 0.1 else f"{per_cent:+.1g} %"


def _is_none(absolute: float | None, relative: float | None) -> bool:
    """No change, or one smaller than a clock can measure."""
    return not absolute or (relative is not None and abs(relative) < 1e-6)


def _number(value: float) -> str:
    return _whole(value) or f"{value:,.2f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else ""
