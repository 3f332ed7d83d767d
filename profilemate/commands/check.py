# SPDX-License-Identifier: Apache-2.0
"""``profilemate check``: does a session pass? Exit code 1 where it does not."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    SessionArgument,
    opened,
)
from profilemate.commands.shared.progress import status
from profilemate.commands.shared.stdout import show
from profilemate.commands.shared.values import folder, share
from profilemate.messages import say

if TYPE_CHECKING:
    from analysis.judgement.check import Checked
    from analysis.summary import Summary
    from analysis.tables.session import Session


@dataclass(frozen=True)
class CheckOptions:
    session: SessionArgument = None
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            metavar="RULE",
            help="A measure, one of < <= > >= == !=, and a limit: 'hit_rate<0.4'. The session "
            "fails if the rule is true. Can be given several times.",
            show_default=False,
        ),
    ] = None
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline",
            metavar="SESSION",
            parser=folder,
            help="Fail if a measure is worse than in this session.",
            show_default=False,
        ),
    ] = None
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            metavar="SHARE",
            parser=share,
            help="How much worse a measure may be, as a share of the baseline's value: 5%. "
            "Default: 0.",
            show_default=False,
        ),
    ] = 0.0
    measure: Annotated[
        list[str] | None,
        typer.Option(
            "--measure",
            metavar="NAME",
            help="Compare only this measure with the baseline. Can be given several times.",
            show_default=False,
        ),
    ] = None
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Check even where the baseline is not comparable."),
    ] = False
    after: After = FROM_THE_BEGINNING
    requests_after: RequestsAfter = 0
    last_half: LastHalf = False
    period: Period = None
    labels: Labels = None
    list_all: Annotated[bool, typer.Option("--list", help="List all measures, and exit.")] = False
    as_json: AsJson = False


def check(options: CheckOptions) -> int:
    """Check a session against limits or a baseline, in pipelines.

    Shows a line for each rule that failed: the measure, its value, the limit. A measure that you
    name fails where the session has no value for it.

    \b
    Examples:
      profilemate check ~/runs --fail-if 'hit_rate<0.4' --fail-if 'preemptions>0'
      profilemate check ~/runs --after 30s --fail-if 'usage_p95>95%'
      profilemate check new --baseline old --tolerance 5%
      profilemate check new --baseline old --measure hit_rate --measure evictions
      profilemate check --list

    \b
    Exit codes:
      0   every rule passed
      1   a rule failed
      2   nothing was checked: no such session, its tables contradict each
          other, no such measure, a wrong option, or a baseline that is not
          comparable (see --anyway)
    """
    from analysis.renderers.text import check as text

    if options.list_all:
        _list_measures(as_json=options.as_json)
        return 0
    found = _checked(options)
    _say_doubts(found, anyway=options.anyway)
    show(found, text.write, as_json=options.as_json)
    return 0 if found.passed else 1


def _list_measures(*, as_json: bool) -> None:
    from analysis.judgement import measures
    from analysis.renderers import json
    from analysis.renderers.text import check as text

    if as_json:
        print(json.catalogue(measures.CATALOGUE))
    else:
        text.write_catalogue(measures.CATALOGUE, sys.stdout)


def _checked(options: CheckOptions) -> Checked:
    from analysis.judgement import check

    rules = options.fail_if or ()
    _refuse_slips(options)
    with status("opening the session"):
        session = _opened(options.session, options)
    if options.baseline is None:
        with status("reading the session"):
            return check.check(_summary(session), rules)
    with status("opening the baseline"):
        baseline = _opened(options.baseline, options)
    if session.directory.resolve() == baseline.directory.resolve():
        raise RuleError(
            f"the session and the baseline are the same: {session.directory}; name another baseline"
        )
    with status("reading the session"):
        found = _summary(session)
    with status("reading the baseline"):
        base = _summary(baseline)
    return check.check(
        found,
        rules,
        baseline=base,
        tolerance=options.tolerance,
        only=options.measure or (),
    )


def _refuse_slips(options: CheckOptions) -> None:
    """Find mistakes in the options before a session is read.

    Raises:
        RuleError: the options make no sense.

    """
    from analysis.judgement import check

    if not options.fail_if and options.baseline is None:
        raise RuleError("nothing to check; give --fail-if 'MEASURE<LIMIT' or --baseline SESSION")
    if options.baseline is None and (options.measure or options.tolerance):
        raise RuleError("--measure and --tolerance need --baseline SESSION")
    asked = [check.rule(rule).measure for rule in options.fail_if or ()]
    named = check.directed(options.measure) if options.measure else []
    for measure in (*asked, *named):
        if "{label=" in measure.name and options.labels is None:
            raise RuleError(
                f"{measure.name} is of a label; say with --labels FILE which requests have it, "
                "with lines of 'name = regex'"
            )


def _opened(path: Path | None, options: CheckOptions) -> Session:
    """The session, if it has a table. Without one every count is 0, and would pass.

    Raises:
        SessionError: there is no such session, or it has no table.

    """
    session = opened(path, options, options.labels)
    if not session.has_tables:
        raise SessionError(
            f"{session.directory} has no table, so there is nothing to check; name another session"
        )
    return session


def _summary(session: Session) -> Summary:
    """The session's summary, if its tables agree. A rule would not notice missing rows.

    Raises:
        SessionError: the tables contradict each other, or cannot be read.

    """
    from analysis import summarize
    from analysis.judgement import consistency

    found = summarize(session)
    doubts = consistency.contradictions(found)
    if doubts:
        raise SessionError(
            f"{found.session.directory} cannot be checked: "
            + "; ".join(doubts)
            + "; put its files back, or record again"
        )
    return found


def _say_doubts(found: Checked, *, anyway: bool) -> None:
    """Say on stderr what speaks against the figures.

    Raises:
        RuleError: the baseline is not comparable, and nobody asked to check anyway.

    """
    if found.doubts and not anyway:
        raise RuleError(
            "the baseline is not comparable (--anyway checks all the same): "
            + " ".join(found.doubts)
        )
    from analysis.wording.session import paused

    doubts = list(found.doubts)
    if found.baseline is None and found.session.state != "complete":
        doubts.append(f"{found.session.session_id} is {found.session.state}: {found.session.note}")
    if found.baseline is None and (period := paused(found.session)) is not None:
        doubts.append(f"{found.session.session_id}: {period}")
    for doubt in doubts:
        say(f"note: {doubt}")
