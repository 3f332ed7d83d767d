# SPDX-License-Identifier: Apache-2.0
"""What does an entry of metadata.json say, where anything may stand and anything may be missing?

Each reads one value and is None, or empty, where it is not of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST = 10**12
"""No fact is a larger number; one that is, or a negative one, is damage."""


def part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object under this name."""
    value = whole.get(name)
    return value if isinstance(value, Mapping) else {}


def parts(whole: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The objects in the list under this name."""
    return [value for value in listed(whole.get(name)) if isinstance(value, Mapping)]


def listed(value: Any) -> list[Any]:
    """The list, and nothing where there is none."""
    return value if isinstance(value, list) else []


def text(value: Any) -> str | None:
    """Text, or a list of which the first counts (a model may be served under several names)."""
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else None


def whole(value: Any) -> int | None:
    """A whole number that makes sense."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and 0 <= value <= _MOST else None


def number(value: Any) -> float | None:
    """A number that makes sense."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= _MOST else None


def flag(value: Any) -> bool | None:
    """True or false."""
    return value if isinstance(value, bool) else None
