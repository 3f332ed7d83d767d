# SPDX-License-Identifier: Apache-2.0
"""The options that several commands have: the session, its warm-up, and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profilemate.commands.shared.values import folder, seconds, whole

if TYPE_CHECKING:
    from analysis.tables.session import Session

SessionArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="SESSION",
        parser=folder,
        help="A session's folder, or a folder of sessions: the newest one is taken. "
        "Default: the newest session in $VLLM_PROFILING_DIR, else in vllm_profiling in the "
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
        help="Leave out the first seconds as warm-up: 30s, 2m, 1.5h.",
        show_default=False,
    ),
]
RequestsAfter = Annotated[
    int,
    typer.Option(
        "--requests-after",
        metavar="N",
        parser=whole,
        help="Leave out the first N requests as warm-up: start when the next request arrives. "
        "Only requests that ended count.",
        show_default=False,
    ),
]
LastHalf = Annotated[
    bool,
    typer.Option(
        "--last-half",
        help="Leave out what came before the second half of the requests as warm-up.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def opened(
    session: Path | None, after: float, requests_after: int, last_half: bool = False
) -> Session:
    """The session without its warm-up.

    Raises:
        SessionError: there is no such session, or nothing is left of it.

    """
    from analysis import open_session

    return open_session(
        session, after_sec=after, after_requests=requests_after, last_half=last_half
    )
