# SPDX-License-Identifier: Apache-2.0
"""``profilemate route``: what several replicas would have found under other routing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.errors import RuleError
from profilemate.commands.shared import traces
from profilemate.commands.shared.options import (
    FROM_THE_BEGINNING,
    After,
    AsJson,
    Labels,
    LastHalf,
    RequestsAfter,
    TimeUnit,
    TokensPerId,
)
from profilemate.commands.shared.progress import status
from profilemate.commands.shared.stdout import show
from profilemate.commands.shared.values import count, folder, whole

if TYPE_CHECKING:
    from analysis.whatif.routing.answer import StickyBy
    from analysis.whatif.routing.replicas import Recorded
    from analysis.whatif.routing.rules import Bounds


@dataclass(frozen=True)
class RouteOptions:
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="SESSIONS|TRACE",
            parser=folder,
            help="The session of each replica, or one session of several data-parallel engines. Or "
            "a trace, with --replicas and --blocks. Default: the newest session.",
            show_default=False,
        ),
    ] = None
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            metavar="NAMES",
            help="With commas between them: round-robin, least-loaded, sticky, prefix-aware, "
            "cache-aware. Default: all.",
            show_default=False,
        ),
    ] = None
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            metavar="N",
            parser=count,
            help="How many replicas there would be. Default: as many as were recorded.",
            show_default=False,
        ),
    ] = None
    blocks: Annotated[
        str | None,
        typer.Option(
            "--blocks",
            metavar="SIZE",
            help="The pool of each replica: blocks as vLLM counts them (4000), or a factor of the "
            "recorded one (0.5x). Default: as recorded.",
            show_default=False,
        ),
    ] = None
    sticky_by: Annotated[
        str,
        typer.Option(
            "--sticky-by",
            metavar="WHAT",
            help="What sticky goes by: conversation, salt, or label, with --labels. Default: "
            "conversation.",
            show_default=False,
        ),
    ] = "conversation"
    labels: Labels = None
    cache_threshold: Annotated[
        float,
        typer.Option(
            "--cache-threshold",
            metavar="SHARE",
            help="prefix-aware, cache-aware: the match has to be more than this share of the "
            "prompt. Default: 0.3.",
            show_default=False,
        ),
    ] = 0.3
    balance_abs_threshold: Annotated[
        int,
        typer.Option(
            "--balance-abs-threshold",
            metavar="REQUESTS",
            parser=whole,
            help="Both go by load alone while loads are more than this apart, default 64,",
            show_default=False,
        ),
    ] = 64
    balance_rel_threshold: Annotated[
        float,
        typer.Option(
            "--balance-rel-threshold",
            metavar="TIMES",
            help="and the largest is more than so many times the smallest. Default: 1.5.",
            show_default=False,
        ),
    ] = 1.5
    step_ms: Annotated[
        float | None,
        typer.Option(
            "--step-ms",
            metavar="MS",
            help="How long a request takes for each token of its answer. Default: each request "
            "takes as long as was recorded; 30 ms a token for a trace.",
            show_default=False,
        ),
    ] = None
    tokens_per_id: TokensPerId = None
    time_unit: TimeUnit = None
    after: After = FROM_THE_BEGINNING
    requests_after: RequestsAfter = 0
    last_half: LastHalf = False
    as_json: AsJson = False


def route(options: RouteOptions) -> int:
    """Try other routing on the requests of several replicas.

    The recorded requests of all replicas are put in the order in which they came, and sent to the
    replicas again, by each rule in turn. A model of each replica's cache says what they find
    there, and what they had to compute although another replica had it. It needs no vLLM.

    \b
    Examples:
      profilemate route replica-0/ replica-1/ replica-2/ replica-3/
      profilemate route SESSION              the engines of a data-parallel one
      profilemate route SESSION --replicas 8 --blocks 4000
      profilemate route SESSION --policies sticky,cache-aware --sticky-by salt
      profilemate route trace.jsonl --replicas 4 --blocks 4000 --step-ms 25

    \b
    Exit codes:
      0   done
      2   contents of the replicas do not compare, no such session, or a wrong
          option
    """
    from analysis.renderers.text import routing as text
    from analysis.whatif.routing import answer

    policies = _policies(options.policies)
    sticky_by, bounds, step_sec = _sticky_by(options), _bounds(options), _step_sec(options)
    with status("reading the requests"):
        recorded = _counting(_recorded(options), options)
        sizes = _sizes(recorded, options.replicas, options.blocks)
    with status("routing the requests"):
        found = answer.routed(
            recorded,
            policies=policies,
            sizes=sizes,
            bounds=bounds,
            sticky_by=sticky_by,
            step_sec=step_sec,
        )
    show(found, text.write, as_json=options.as_json)
    return 0


def _policies(given: str | None) -> tuple[str, ...]:
    from analysis.whatif import configuration
    from analysis.whatif.routing import answer

    if given is None:
        return answer.POLICIES
    try:
        return tuple(dict.fromkeys(configuration.words(given, answer.POLICIES)))
    except RuleError as error:
        raise RuleError(f"--policies: {error}") from None


def _sticky_by(options: RouteOptions) -> StickyBy:
    from analysis.whatif.routing.answer import STICKY_BY

    found = next((by for by in STICKY_BY if by == options.sticky_by), None)
    if found is None:
        raise RuleError(f"--sticky-by: {options.sticky_by!r} is none of {', '.join(STICKY_BY)}")
    if found == "label" and options.labels is None:
        raise RuleError("--sticky-by label: no labels are known; give --labels FILE")
    return found


def _bounds(options: RouteOptions) -> Bounds:
    from analysis.whatif.routing.rules import Bounds

    if not 0 <= options.cache_threshold <= 1:
        raise RuleError(
            f"--cache-threshold is {options.cache_threshold:g}; give a share from 0 to 1"
        )
    times = options.balance_rel_threshold
    if not (math.isfinite(times) and times >= 0):
        raise RuleError(f"--balance-rel-threshold is {times:g}; give a number from 0 on")
    return Bounds(options.cache_threshold, options.balance_abs_threshold, times)


def _step_sec(options: RouteOptions) -> float | None:
    given = options.step_ms
    if given is None:
        return None
    if not 0 < given < 1e6:
        raise RuleError(f"--step-ms is {given:g}; give more than 0 and less than 1,000,000 ms")
    return given / 1e3


def _recorded(options: RouteOptions) -> Recorded:
    """The requests of all sources.

    Raises:
        RuleError: the sources do not go together, or an option does not go with them.
        SessionError: one cannot be read, or their contents do not compare.

    """
    from analysis import open_session
    from analysis.whatif import workload
    from analysis.whatif.routing import replicas

    sources = options.sources or []
    files = [source for source in sources if source.is_file()]
    if files:
        if len(sources) > 1:
            raise RuleError(f"{files[0]} is a trace; give it alone, with --replicas")
        if options.labels is not None:
            raise RuleError("--labels: a trace has no request ids; the option is for sessions")
        return replicas.of_trace(
            workload.read_workload(
                files[0],
                tokens_per_id=traces.tokens_per_id(options.tokens_per_id),
                time_unit=traces.time_unit(options.time_unit),
            )
        )
    traces.for_sessions_no_option(tokens_per_id=options.tokens_per_id, time_unit=options.time_unit)
    named: list[Path | None] = [*sources] or [None]
    opened = [open_session(source, label_rules=options.labels) for source in named]
    # Each copy of what a URL names has a folder of its own.
    places = [one.url or one.directory.resolve() for one in opened]
    for at, one in enumerate(places):
        if one in places[:at]:
            raise RuleError(f"{one} is there twice; give the session of each replica once")
    return replicas.of_sessions(opened)


def _counting(recorded: Recorded, options: RouteOptions) -> Recorded:
    """The same, with a warm-up that does not count."""
    if options.after.mark is not None:
        raise RuleError("--after: a mark is one session's; leave a time out, --after 30s")
    counted = recorded.workload.after(
        options.after.sec, options.requests_after, last_half=options.last_half
    )
    return replace(recorded, workload=counted)


def _sizes(recorded: Recorded, count: int | None, text: str | None) -> tuple[int, ...] | None:
    """Usable blocks of each replica; None as recorded. The user counts the null block, too."""
    from analysis.whatif import configuration
    from analysis.whatif.routing.replicas import MOST

    own = recorded.num_blocks
    if count is not None and not 2 <= count <= MOST:
        raise RuleError(f"--replicas is {count}; give a number from 2 to {MOST:,}")
    replicas = count or len(own)
    if not replicas:
        raise RuleError(f"{recorded.workload.name} is a trace; say --replicas and --blocks")
    if text is None and replicas == len(own):
        return None
    factor = 1.0
    if text is not None:
        try:
            (pool, *more) = configuration.pools(text)
        except RuleError as error:
            raise RuleError(f"--blocks: {error}") from None
        if more:
            raise RuleError("--blocks: every replica has the same size; give one")
        if pool.blocks is not None:
            return (pool.blocks - 1,) * replicas
        factor = pool.factor or 1.0
    known = [size for size in own if size is not None]
    if not known or len(known) < len(own):
        raise RuleError(
            f"--blocks: {recorded.workload.name} does not say how large its pool was; give a "
            "number of blocks"
        )
    times = tuple(max(1, round((size + 1) * factor) - 1) for size in known)
    if replicas == len(own):
        return times
    if len(set(times)) > 1:
        raise RuleError(
            f"--replicas: the recorded pools have {min(known):,} to {max(known):,} blocks; say "
            "with --blocks how many each replica has"
        )
    return times[:1] * replicas
