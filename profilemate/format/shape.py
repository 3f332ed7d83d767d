# SPDX-License-Identifier: Apache-2.0
"""Does a value out of JSON have the shape that a TypedDict declares?"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

MOST = 10**30
"""Larger numbers are damage: nanoseconds, added up over a million years."""

_SHOWN = 40
"""Characters of an odd value that a message shows."""


def fault(value: Any, shape: Any, where: str = "") -> str | None:
    """What is wrong with the value, and where; None where nothing is.

    Numbers are from 0 to ``MOST``, and text can be written as UTF-8. A key of a TypedDict that is
    not ``total`` may be missing. Keys that the TypedDict does
    not have are those of a newer profilemate, and are left alone.

    >>> fault([3, -1], list[int], "counts")
    'counts[1] is -1'

    Args:
        value: what was read.
        shape: ``int``, ``float``, ``bool``, ``str``, ``None``, a TypedDict, ``list[...]`` or
            ``dict[str, ...]`` of these, or a union of them.
        where: the value's place, for the message.

    """
    kind = get_origin(shape) or shape
    if kind in (Union, types.UnionType):
        faults = [fault(value, each, where) for each in get_args(shape)]
        return None if None in faults else faults[0]
    if is_typeddict(kind):
        return _fault_in_keys(value, kind, where)
    if kind is list and isinstance(value, list):
        (inner,) = get_args(shape)
        places = ((f"{where}[{number}]", each, inner) for number, each in enumerate(value))
    elif kind is dict and isinstance(value, Mapping):
        _, inner = get_args(shape)
        places = ((f"{where}.{name}", each, inner) for name, each in value.items())
        if not all(map(_is_text, value)):
            return f"a name in {where} is no text"
    else:
        return None if _is_plain(value, kind) else f"{where} is {_shown(value)}"
    return next(filter(None, (fault(each, inner, place) for place, each, inner in places)), None)


def _fault_in_keys(value: Any, kind: Any, where: str) -> str | None:
    if not isinstance(value, Mapping):
        return f"{where or 'it'} is {_shown(value)}"
    for name, shape in get_type_hints(kind).items():
        place = f"{where}.{name}" if where else name
        if name not in value:
            if name in kind.__optional_keys__:
                continue
            return f"{place} is missing"
        found = fault(value[name], shape, place)
        if found is not None:
            return found
    return None


def _is_plain(value: Any, kind: Any) -> bool:
    if kind is int:
        return type(value) is int and 0 <= value <= MOST
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= MOST
    if kind is bool:
        return isinstance(value, bool)
    if kind is str:
        return _is_text(value)
    return kind is type(None) and value is None


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(value.encode()) is bool(value)
    except UnicodeEncodeError:
        return False


def _shown(value: Any) -> str:
    """The value, short and printable."""
    return ascii(value)[:_SHOWN]
