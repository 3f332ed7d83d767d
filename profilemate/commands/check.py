# SPDX-License-Identifier: Apache-2.0
"""``profilemate check``: does a session pass? Exit code 1 where it does not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.errors import RuleError, SessionError
from profilemate.commands.options import (
    After,
    AsJson,
    RequestsAfter,
    SessionArgument,
    folder,
    opened,
)
from profilemate.commands.reporting import one_line
from profilemate.commands.waiting import waiting

if TYPE_CHECKING:
    from analysis.judgement.gate import Checked
    from analysis.summary import Summary
    from analysis.tables.session import Session


def share(text: str) -> float:
    """The share that a tolerance comes to: 5%, or 0.05.

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


def check(
    session: SessionArgument = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            metavar="RULE",
            help="A measure, <, <=, >, >=, == or !=, and a limit, such as 'hit_rate<0.4'; the "
            "session fails where it is true. Can be given several times.",
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline",
            metavar="SESSION",
            parser=folder,
            help="Fail where a measure is worse than this session's.",
            show_default=False,
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            metavar="SHARE",
            parser=share,
            help="By how much it may be worse, of the baseline's value: 5%. Without it: by 0.",
            show_default=False,
        ),
    ] = 0.0,
    measure: Annotated[
        list[str] | None,
        typer.Option(
            "--measure",
            metavar="NAME",
            help="Hold only this measure against the baseline. Can be given several times.",
            show_default=False,
        ),
    ] = None,
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Check against a baseline that cannot be compared, too."),
    ] = False,
    after: After = 0.0,
    requests_after: RequestsAfter = 0,
    list_all: Annotated[
        bool, typer.Option("--list", help="List the measures that there are, and exit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a session against limits and a baseline, for pipelines.

    Each rule that failed is a line: the measure, its value, the limit. A measure of which the
    session has no value fails a rule that names it.

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
      2   it could not be checked: no such session, one whose tables are not
          whole, no such measure, a wrong option, or a baseline that cannot be
          compared (see --anyway)
    """
    with one_line():
        from analysis.judgement import measures
        from analysis.renderers import json
        from analysis.renderers.text import check as text

        # A name that the terminal's encoding cannot show must not end it.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        if list_all:
            if as_json:
                print(json.catalogue(measures.CATALOGUE))
            else:
                text.write_catalogue(measures.CATALOGUE, sys.stdout)
            return
        found = _checked(
            session, fail_if or (), baseline, tolerance, measure or (), after, requests_after
        )
        _say_doubts(found, anyway=anyway)
        if as_json:
            print(json.render(found))
        else:
            text.write(found, sys.stdout)
    if not found.passed:
        raise typer.Exit(1)


def _checked(
    session: Path | None,
    fail_if: Sequence[str],
    baseline: Path | None,
    tolerance: float,
    only: Sequence[str],
    after: float,
    requests_after: int,
) -> Checked:
    import analysis
    from analysis.judgement import gate

    if not fail_if and baseline is None:
        raise RuleError("nothing to check; give --fail-if 'MEASURE<LIMIT', or --baseline SESSION")
    if baseline is None and (only or tolerance):
        raise RuleError("--measure and --tolerance go with --baseline SESSION")
    # Before a session is read: a slip is told at once.
    for text in fail_if:
        gate.rule(text)
    gate.directed(only)
    with waiting("opening the session"):
        chosen = _recorded(opened(session, after, requests_after))
    if baseline is None:
        with waiting("reading the session"):
            return gate.check(_whole(analysis.summarize(chosen)), fail_if)
    with waiting("opening the baseline"):
        against = _recorded(opened(baseline, after, requests_after))
    if chosen.directory.resolve() == against.directory.resolve():
        raise RuleError(
            f"the session and the baseline are the same: {chosen.directory}; name another baseline"
        )
    with waiting("reading the session"):
        found = _whole(analysis.summarize(chosen))
    with waiting("reading the baseline"):
        base = _whole(analysis.summarize(against))
    return gate.check(found, fail_if, baseline=base, tolerance=tolerance, only=only)


def _recorded(session: Session) -> Session:
    """The session, which has a table: of one without, every count is 0 and would pass."""
    from analysis.tables.schema import TABLES

    if not any((session.directory / table.file).is_file() for table in TABLES.values()):
        raise SessionError(f"{session.directory} has no table, so there is nothing to check")
    return session


def _whole(found: Summary) -> Summary:
    """What was found, in tables that fit each other: of rows that are gone no rule would know."""
    from analysis.judgement import consistency

    doubts = consistency.contradictions(found)
    if doubts:
        raise SessionError(
            f"{found.session.directory} is not whole, so it cannot be checked: "
            + "; ".join(doubts)
            + "; put its files back, or record anew"
        )
    return found


def _say_doubts(found: Checked, *, anyway: bool) -> None:
    """What stands against the figures goes to stderr; a baseline that does not compare ends it."""
    if found.doubts and not anyway:
        raise RuleError(
            "the baseline cannot be compared (--anyway checks all the same): "
            + " ".join(found.doubts)
        )
    doubts = list(found.doubts)
    if found.baseline is None and found.session.state != "complete":
        doubts.append(f"{found.session.session_id} is {found.session.state}: {found.session.note}")
    for doubt in doubts:
        print("profilemate: note:", doubt, file=sys.stderr)
