# SPDX-License-Identifier: Apache-2.0
"""``profilemate summary``: what a session's tables say, as text or as JSON."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from analysis.errors import RuleError, SessionError
from profilemate.commands.shared.options import (
    FROM_THE_BEGINNING,
    After,
    AsJson,
    Labels,
    LastHalf,
    Period,
    RequestsAfter,
    opened,
)
from profilemate.commands.shared.progress import status
from profilemate.commands.shared.replaying import (
    USUAL_SEC,
    NoReplayOption,
    ReplayFor,
    replaying,
)
from profilemate.commands.shared.stdout import show
from profilemate.commands.shared.values import folder, key

Sessions = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="SESSION",
        parser=folder,
        help="A session's folder, or a folder of sessions: the newest one is taken. Several "
        "folders: the sessions of one deployment on several hosts, which are joined. Default: the "
        "newest session in $VLLM_PROFILING_DIR, else in vllm_profiling in the system's temporary "
        "folder.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class SummaryOptions:
    sessions: Sessions = None
    after: After = FROM_THE_BEGINNING
    requests_after: RequestsAfter = 0
    last_half: LastHalf = False
    period: Period = None
    labels: Labels = None
    full: Annotated[
        bool,
        typer.Option("--full", help="All sections, and the reasons for the advice: some pages."),
    ] = False
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also the other sessions of the same program, which has one for each LLM: a table "
            "of all, then the summary of each.",
        ),
    ] = False
    by: Annotated[
        list[str] | None,
        typer.Option(
            "--by",
            metavar="KEY",
            help="The figures split by salt, lora, priority, api-server, engine, or label, which "
            "needs --labels: who found what, evicted what, and waited how long.",
            parser=key,
            show_default=False,
        ),
    ] = None
    no_replay: NoReplayOption = False
    replay_for: ReplayFor = USUAL_SEC
    as_json: AsJson = False

    @property
    def session(self) -> Path | None:
        """The one that is named; None where none is."""
        return self.sessions[0] if self.sessions else None


def summary(options: SummaryOptions) -> int:
    """Summarize a session.

    Shows on one screen what was found, which setting to change, and the key figures. --full has
    all sections: KV cache usage, block lifetimes, evictions, prefix cache hits, preemptions, CUDA
    graphs.

    Where vLLM can be imported, the numbers that advice names are tried before they are advised:
    the session's requests go through vLLM's scheduler again. That takes at most 20 s.

    Works while vLLM runs and after a crash, and says how far the data goes.

    \b
    Examples:
      profilemate summary             the newest session
      profilemate summary --full      all that is known of it
      profilemate summary ~/runs      the newest session in this folder
      profilemate summary ~/runs/session_20260131_120000_4711_c0ffee
      profilemate summary --after 30s
                                      without the first half minute
      profilemate summary --no-replay
                                      at once, with estimated advice
      profilemate summary --by lora   the same figures for each adapter
      profilemate summary --all       every engine that the program made
      profilemate summary host-a/SESSION host-b/SESSION
                                      a deployment on two hosts
      profilemate summary --json | jq .prefix_cache.true.token_rate

    \b
    Exit codes:
      0   done
      2   no such session, the session cannot be read, or a wrong option
    """
    if options.sessions and len(options.sessions) > 1:
        return _joined(options, options.sessions)
    return _shown(options)


def _joined(options: SummaryOptions, sessions: Sequence[Path]) -> int:
    """Show several sessions as one, which lies in a folder only meanwhile."""
    from profilemate.commands import join

    if options.every:
        raise RuleError("--all is for the sessions of one program; name one session, or leave it")
    with tempfile.TemporaryDirectory(prefix="profilemate-") as scratch:
        place = Path(scratch, "joined")
        place.mkdir()
        try:
            with status("joining the sessions"):
                join.write_joined(join.opened(sessions), place)
        except OSError as error:
            raise SessionError(f"cannot write {scratch}: {error.strerror or error}") from None
        return _shown(replace(options, sessions=[place]))


def _shown(options: SummaryOptions) -> int:
    from analysis import summarize
    from analysis.renderers.text import screen
    from analysis.renderers.text import summary as text

    if options.by:
        if len(options.by) > 1:
            raise RuleError(f"--by {' --by '.join(options.by)}: one kind of key at a time")
        return _by_whom(options, options.by[0])
    if options.every:
        return _together(options)
    session = opened(options.session, options, options.labels)
    trying = replaying(session, no_replay=options.no_replay, replay_for=options.replay_for)
    with trying as advice:
        with status("reading the session"):
            advice.begin(summarize(session))
        with status("trying the advice"):
            found = advice.result()
    write = text.write if options.full else screen.write
    show(found, write, as_json=options.as_json)
    return 0


def _by_whom(options: SummaryOptions, by: str) -> int:
    """Show the figures by one kind of key.

    Raises:
        RuleError: there are no rules for labels, or another option asks for something else.

    """
    from analysis import summarize
    from analysis.renderers.text import by_whom as text

    if by == "label" and options.labels is None:
        raise RuleError("--by label needs --labels FILE, with lines of 'name = regex'")
    if options.every or options.full:
        raise RuleError("--by shows one table of one session; leave out --all and --full")
    with status("reading the session"):
        found = summarize(opened(options.session, options, options.labels))
    split = found.by_whom.split(by)
    if split is None:
        raise SessionError(f"{found.session.directory} has no figures by {by}")
    show(split, partial(text.write, found), as_json=options.as_json)
    return 0


def _together(options: SummaryOptions) -> int:
    """Show the session and those beside it."""
    from analysis.judgement.siblings import together
    from analysis.renderers.text import siblings as text
    from analysis.tables.find import find_session, siblings

    with status("reading the sessions"):
        folders = siblings(find_session(options.session))
        found = together([opened(folder, options, options.labels) for folder in folders])
    show(found, partial(text.write, full=options.full), as_json=options.as_json)
    return 0
