# SPDX-License-Identifier: Apache-2.0
"""The options that several commands have: the session, its warm-up, and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from profilemate.commands.shared.values import Moment, count, folder, moment, whole

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
FROM_THE_BEGINNING = Moment()

After = Annotated[
    Moment,
    typer.Option(
        "--after",
        metavar="TIME",
        parser=moment,
        help="Leave out the first seconds as warm-up: 30s, 2m, 1.5h; or what came before a mark: "
        "its text.",
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
Period = Annotated[
    int | None,
    typer.Option(
        "--period",
        metavar="N",
        parser=count,
        help="Of a recording that was paused: the N-th part between two pauses. "
        "Default: the last one.",
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
Labels = Annotated[
    Path | None,
    typer.Option(
        "--labels",
        metavar="FILE",
        help="Names for requests by their ids, a rule a line: name = regular expression. The first "
        "that is found in the id counts.",
        show_default=False,
    ),
]
TokensPerId = Annotated[
    int | None,
    typer.Option(
        "--tokens-per-id",
        metavar="TOKENS",
        parser=count,
        help="Tokens that an id of a trace stands for. Default: what its lengths prove.",
        show_default=False,
    ),
]
TimeUnit = Annotated[
    str | None,
    typer.Option(
        "--time-unit",
        metavar="UNIT",
        help="Unit of a trace's times: s, ms, us or ns. Default: that of its kind, else ms.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def output_file(what: str, default: str) -> Any:
    """The option ``-o FILE`` of a command that writes one file, by default into the session."""
    return typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help=f"{what} Default: {default} in the session's folder. Only you can read the file.",
        show_default=False,
    )


class Part(Protocol):
    """The options that say which part of a session is looked at."""

    @property
    def after(self) -> Moment: ...
    @property
    def requests_after(self) -> int: ...
    @property
    def last_half(self) -> bool: ...
    @property
    def period(self) -> int | None: ...


def opened(session: Path | None, options: Part, labels: Path | None = None) -> Session:
    """The part of the session that these options ask for. ``labels``: the user's rule file.

    Raises:
        SessionError: there is no such session or part, or nothing is left of it.

    """
    from analysis import open_session

    return open_session(
        session,
        after_sec=options.after.sec,
        after_mark=options.after.mark,
        after_requests=options.requests_after,
        last_half=options.last_half,
        period=options.period,
        label_rules=labels,
    )
