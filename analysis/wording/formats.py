# SPDX-License-Identifier: Apache-2.0
"""Figures as people read them: the same words in every renderer."""

from __future__ import annotations

from collections.abc import Sequence


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f} %"


def share(value: float | None) -> str:
    return percent(None if value is None else 100 * value)


def seconds(value: float | None) -> str:
    if value is None:
        return "n/a"
    if value < 0.001:
        return f"{value * 1e6:.0f} us"
    if value < 1:
        return f"{value * 1e3:.1f} ms"
    if value < 1e5:
        return f"{value:,.2f} s" if value < 1000 else f"{value:,.0f} s"
    return f"{value / 3600:,.1f} h"


def counted(count: int, noun: str) -> str:
    """The count with its noun, which takes an s in the plural."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(value: float) -> str:
    if value < 120:
        return seconds(value)
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min {rest:02} s" if hours else f"{minutes} min {rest:02} s"


def number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.0f}"


def byte_size(size: float | None) -> str:
    if size is None:
        return "n/a"
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def with_details(figure: str | None, details: Sequence[str | None]) -> str:
    """The figure with those of the details that are known, in brackets."""
    known = ", ".join(filter(None, details))
    return " ".join(filter(None, [figure or "unknown", f"({known})" if known else ""]))


def ranges(numbers: Sequence[int]) -> str:
    """Growing numbers, those at an even distance as one: ``1, 2, 4, 8 to 248 by 8, 256``."""
    parts, at = [], 0
    while at < len(numbers):
        end = at + 1
        while end + 1 < len(numbers) and (
            numbers[end + 1] - numbers[end] == numbers[end] - numbers[end - 1]
        ):
            end += 1
        if end - at < 3:
            parts.append(f"{numbers[at]:,}")
            at += 1
            continue
        step = numbers[end] - numbers[end - 1]
        parts.append(f"{numbers[at]:,} to {numbers[end]:,}" + (f" by {step:,}" if step > 1 else ""))
        at = end + 1
    return ", ".join(parts)
