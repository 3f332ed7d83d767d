# SPDX-License-Identifier: Apache-2.0
"""Read what an option's text says: a time, a whole number, a share, a folder."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import typer

from analysis.errors import SessionError
from profilemate.commands.shared.errors import errors_in_one_line
from profilemate.format.marks import text_of_mark

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """Seconds of a length of time: 30s, 2m, 1.5h, 500ms, or a plain number.

    >>> seconds("2m"), seconds("1.5 h"), seconds("0.5")
    (120.0, 5400.0, 0.5)
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?([a-z]*)", str(text).strip(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is not a time; write 30s, 2m, 1.5h or plain seconds")
    value = float(match[1]) * _UNITS[match[2]]
    if not math.isfinite(value):
        raise typer.BadParameter(f"{text!r} is too long; write 30s, 2m, 1.5h or plain seconds")
    return value


@dataclass(frozen=True)
class Moment:
    """So many seconds after a session began, or the mark with this text."""

    sec: float = 0.0
    mark: str | None = None


def moment(text: str) -> Moment:
    """Seconds, or the text of a mark.

    >>> moment("2m"), moment("2nd deployment")
    (Moment(sec=120.0, mark=None), Moment(sec=0.0, mark='2nd deployment'))
    """
    if isinstance(text, Moment):
        return text
    try:
        return Moment(seconds(text))
    except typer.BadParameter:
        mark = text_of_mark(str(text))
        if not mark:
            raise
        return Moment(mark=mark)


def is_time(text: str) -> bool:
    """Whether ``moment`` takes the text for a time, whatever mark there is."""
    return moment(text).mark is None


def whole(text: str) -> int:
    """A whole number from 0 on.

    >>> whole("12")
    12
    """
    # int() takes the digits of every script, and thousands of them.
    if re.fullmatch(r"\d{1,18}", str(text).strip(), re.ASCII) is None:
        raise typer.BadParameter(f"{text!r} is not a whole number; write 0, 1, 2 or more")
    return int(text)


def count(text: str) -> int:
    """As ``whole``, for what is refused afterwards where it is 0, in words of its own.

    >>> count("12")
    12
    """
    try:
        return whole(text)
    except typer.BadParameter:
        raise typer.BadParameter(f"{text!r} is not a whole number; write 1, 2, 3 or more") from None


def share(text: str) -> float:
    """A share, as per cent or as a number: 5%, 0.05.

    >>> share("5%"), share("0.05"), share("0")
    (0.05, 0.05, 0.0)
    """
    number, percent, rest = str(text).strip().partition("%")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    # float() takes the digits of every script.
    if rest or not number.isascii() or not 0 <= value < float("inf"):
        raise typer.BadParameter(f"{text!r} is not a tolerance; write 5% or 0.05")
    if not percent and value > 1:
        raise typer.BadParameter(f"{text!r} would be {100 * value:g} %; write {value:g}%")
    return value / 100 if percent else value


KEYS = ("salt", "lora", "priority", "api-server", "engine", "label")
"""By whom a summary can be split: ``analysis.requests.askers.EVERY``, which takes Polars."""


def key(text: str) -> str:
    """By whom: a kind of key.

    >>> key("lora")
    'lora'
    """
    if text not in KEYS:
        raise typer.BadParameter(f"{text!r} is no kind of key; write one of {', '.join(KEYS)}")
    return text


def folder(text: str) -> Path:
    """A path. An empty one is refused, since it would mean the current folder."""
    with errors_in_one_line():
        if not text:
            raise SessionError(
                "the path of a session is empty; name a folder, or . for the current one"
            )
    return Path(text)
