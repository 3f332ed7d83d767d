# SPDX-License-Identifier: Apache-2.0
"""What every verb that analyses a session takes: which session, and how much of it is warm-up."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.errors import SessionError
from profilemate.commands.reporting import one_line

if TYPE_CHECKING:
    from analysis.tables.session import Session

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """The seconds that a length of time comes to: 30s, 2m, 1.5h, 500ms, or a plain number.

    >>> seconds("2m"), seconds("1.5 h"), seconds("0.5")
    (120.0, 5400.0, 0.5)
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?([a-z]*)", str(text).strip(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is not a time; write 30s, 2m, 1.5h or plain seconds")
    value = float(match[1]) * _UNITS[match[2]]
    if not math.isfinite(value):
        raise typer.BadParameter(f"{text!r} is too long")
    return value


def whole(text: str) -> int:
    """The whole number, from 0 on, that a text states.

    >>> whole("12")
    12
    """
    # int() takes the digits of every script, and thousands of them.
    if re.fullmatch(r"\d{1,18}", str(text).strip(), re.ASCII) is None:
        raise typer.BadParameter(f"{text!r} is not a number; write a whole one from 0 on")
    return int(text)


def folder(text: str) -> Path:
    """The path, which is not empty: that would be the working folder."""
    with one_line():
        if not text:
            raise SessionError("the path of a session is empty; name a folder, or . for this one")
    return Path(text)


SessionArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="SESSION",
        parser=folder,
        help="A session's folder, or a folder of sessions, of which the newest is taken. "
        "Without it: the newest in $VLLM_PROFILING_DIR, or in vllm_profiling in the "
        "system's temporary folder.",
        show_default=False,
    ),
]
After = Annotated[
    float,
    typer.Option(
        "--after",
        metavar="TIME",
        parser=seconds,
        help="Leave the first seconds out, as warm-up: 30s, 2m, 1.5h.",
        show_default=False,
    ),
]
RequestsAfter = Annotated[
    int,
    typer.Option(
        "--requests-after",
        metavar="N",
        parser=whole,
        help="Leave out what came before the arrival of the request that follows the first N "
        "(of those that have ended).",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def opened(session: Path | None, after: float, requests_after: int) -> Session:
    """The session without its warm-up; within ``reporting.one_line``."""
    from analysis import open_session

    return open_session(session, after_sec=after, after_requests=requests_after)
