# SPDX-License-Identifier: Apache-2.0
"""``profilemate fleet``: all sessions of a fleet, side by side and together."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.errors import RuleError, SessionError
from profilemate.commands.shared.files import writable, write
from profilemate.commands.shared.options import AsJson
from profilemate.commands.shared.progress import bars
from profilemate.commands.shared.stdout import show, show_line
from profilemate.commands.shared.values import whole
from profilemate.messages import say

if TYPE_CHECKING:
    from analysis.fleet.merging import Fleet
    from profilemate.fleet.reading import Read

STOPPED = 130
"""The exit code of a command that Ctrl-C ended."""
MOST_JOBS = 1024


@dataclass(frozen=True)
class FleetOptions:
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATHS",
            help="Sessions' folders, folders of sessions, patterns of either, or URLs.",
            show_default=False,
        ),
    ]
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="KEY",
            help="Group by deployment, model, replica, host, release or hour. Default: model.",
            show_default=False,
        ),
    ] = "model"
    gpu_hour: Annotated[
        float | None,
        typer.Option(
            "--gpu-hour",
            metavar="PRICE",
            help="The price of an hour of a GPU, to say what waste costs: 2.50.",
            show_default=False,
        ),
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Read each session as a task on a Ray cluster: its address, auto (the one of this "
            "machine) or local (a new one here).",
            show_default=False,
        ),
    ] = None
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs",
            metavar="N",
            parser=whole,
            help="Sessions to read at once here. Default: one for each processor.",
            show_default=False,
        ),
    ] = 0
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write an HTML page, too. Only you can read the file.",
            show_default=False,
        ),
    ] = None
    reports: Annotated[
        Path | None,
        typer.Option(
            "--reports",
            metavar="FOLDER",
            help="With -o, write each session's report there, for the page to link to. Default: it "
            "links to the reports that are in the sessions' folders.",
            show_default=False,
        ),
    ] = None
    as_json: AsJson = False


def fleet(options: FleetOptions) -> int:
    """Summarize all sessions of a fleet, side by side and together.

    Counts and histograms of the sessions are added up, so the figures are those of one long
    session; a quantile comes with the bounds that it lies in. Replicas that stand out from those
    like them are named, with the session that shows it. Where the sessions' contents compare, it
    says what replicas had to compute although another one had it.

    \b
    Examples:
      profilemate fleet ~/runs
      profilemate fleet ~/runs --by deployment --gpu-hour 2.50
      profilemate fleet 'runs/2026-02-*' -o fleet.html --reports reports
      profilemate fleet /shared/runs --ray auto
      profilemate fleet ~/runs --json | jq '.outliers[] | {replica, measure}'

    \b
    Exit codes:
      0     done
      1     done, and some sessions could not be read: they are listed
      2     no such session, no session could be read, or a wrong option
      130   stopped by Ctrl-C
    """
    from analysis.fleet.merging import KEYS
    from analysis.renderers.text import fleet as text
    from profilemate.fleet import paths

    if options.by not in KEYS:
        raise RuleError(f"--by {options.by} is not known; give one of {', '.join(KEYS)}")
    price = options.gpu_hour
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise RuleError(f"--gpu-hour is {price:g}; give a price from 0 on, as 2.50")
    if options.jobs > MOST_JOBS:
        raise RuleError(f"--jobs is {options.jobs}; give a number from 1 to {MOST_JOBS}")
    if options.reports is not None and options.output is None:
        raise RuleError("--reports is for the page's links; name the page's file with -o")
    target = None if options.output is None else writable(options.output, "-o")
    found, snapshots = paths.sessions(options.paths)
    if snapshots:
        say(
            f"{snapshots} snapshots are left out, as their sessions have the same; name one to "
            "count it"
        )
    try:
        with tempfile.TemporaryDirectory(prefix="profilemate-fleet-") as scratch:
            merged = _merged(found, options, Path(scratch))
    except KeyboardInterrupt:
        say("stopped; nothing was written")
        return STOPPED
    except OSError as error:
        raise SessionError(
            f"cannot keep what was read in {tempfile.gettempdir()}: {error.strerror or error}; "
            "TMPDIR names another folder"
        ) from None
    if not merged.sessions:
        raise SessionError(
            f"no session could be read; {merged.failed[0].path}: {merged.failed[0].reason}"
        )
    if target is not None:
        _write_page(merged, target, options.reports)
    if target is None or options.as_json:
        show(merged, text.write, as_json=options.as_json)
    else:
        show_line(f"{options.output} is written")
    return 1 if merged.failed else 0


def _write_page(merged: Fleet, target: Path, folder: Path | None) -> None:
    from analysis.renderers.html import fleet as page
    from profilemate.commands import fleet_reports

    reports = (
        fleet_reports.there(merged) if folder is None else fleet_reports.written(merged, folder)
    )
    write(target, page.render(merged, fleet_reports.seen_from(target, reports)))


def _merged(found: Sequence[str], options: FleetOptions, scratch: Path) -> Fleet:
    from analysis.fleet.joining import Joining
    from analysis.fleet.merging import Failed, Merging

    merging, joining = Merging(options.by, options.gpu_hour), Joining(scratch)
    with bars(["sessions"], len(found)) as show_done, closing(_read(found, options)) as reads:
        for number, one in enumerate(reads, start=1):
            if isinstance(one, Failed):
                merging.fail(one)
            elif merging.add(one):
                joining.add(one.origin, one.shared)
            show_done(0, number)
    return merging.result(joining.result())


def _read(found: Sequence[str], options: FleetOptions) -> Generator[Read, None, None]:
    from profilemate.fleet import local, on_ray

    jobs = options.jobs or os.cpu_count() or 1
    if options.ray is None:
        yield from local.read_all(found, jobs)
        return
    with on_ray.cluster(options.ray, jobs) as cluster:
        yield from cluster.read_all(found)
