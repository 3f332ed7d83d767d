# SPDX-License-Identifier: Apache-2.0
"""``profilemate sweep``: one command under many settings, each run profiled, and their table."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.errors import RuleError
from profilemate.commands.options import AsJson, seconds, whole
from profilemate.commands.reporting import one_line
from profilemate.commands.writing import write

if TYPE_CHECKING:
    from analysis.sweep import Sweep
    from profilemate.sweep.folder import Plan

MOST_REPEATS = 1000
TABLE_FILE = "table.csv"
RUNS_FILE = "runs.csv"
CHART_FILE = "chart.html"


def sweep(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            help="What is run, after '--': such as vllm bench throughput --model MODEL.",
            show_default=False,
        ),
    ],
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUES",
            help="Values of a flag, with commas between them: max-num-seqs=1,4,16. With several, "
            "each is run with each.",
            show_default=False,
        ),
    ] = None,
    listed: Annotated[
        Path | None,
        typer.Option(
            "--list",
            metavar="FILE",
            help="Combinations, one a line: max-num-seqs=4 block-size=16.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Where the runs go; one that was stopped goes on there. Without it: a new folder "
            "in the working one.",
            show_default=False,
        ),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option(
            "--repeat",
            metavar="N",
            parser=whole,
            help="Make each run so often; once unless given.",
            show_default=False,
        ),
    ] = 1,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="TIME",
            parser=seconds,
            help="Stop a run that takes longer: 10m, 1h.",
            show_default=False,
        ),
    ] = 0.0,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Make runs that failed anew.")
    ] = False,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="hf",
            help="Answer the prompts of 'vllm bench throughput' with Hugging Face's generate(), "
            "too, and tell the speed-up.",
            show_default=False,
        ),
    ] = None,
    baseline_batch: Annotated[
        int,
        typer.Option(
            "--baseline-batch",
            metavar="N",
            parser=whole,
            help="Prompts that the baseline answers at a time; 8 unless given.",
            show_default=False,
        ),
    ] = 8,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print each run's command, and run nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a command under many settings, and put the runs side by side.

    Each combination is a run of its own, profiled into a folder of its own. Settings are appended
    to the command as flags, or take the place of {max-num-seqs} in it where that stands there;
    {run} is the run's folder. A run that fails is told of and does not end the sweep.

    \b
    Examples:
      profilemate sweep --set max-num-seqs=1,4,16,64 --set block-size=16,32 \\
          -- vllm bench throughput --model MODEL --input-len 512
      profilemate sweep --repeat 3 --baseline hf -o lab --set max-num-seqs=1,16 \\
          -- vllm bench throughput --model MODEL --input-len 512
      profilemate sweep -o lab ... -- vllm bench ...     goes on where it stopped
      profilemate sweep --set max-num-seqs=4,8 -- sh serve-and-bench.sh

    \b
    Exit codes:
      0     every run was done
      1     a run failed
      2     it could not begin: a wrong option, another sweep's folder
      130   it was stopped; the same command goes on with it
    """
    with one_line():
        from analysis import sweep as results
        from profilemate.sweep import folder, running, sweeping

        if output == Path("-"):
            raise RuleError("--output -: runs go to a folder, and not to stdout; name one")
        plan = _plan(command, sets or (), listed, repeat, baseline, baseline_batch)
        directory = (output or Path(time.strftime("sweep_%Y%m%d_%H%M%S"))).absolute()
        if dry_run:
            for line in sweeping.commands(plan, directory):
                print(line)
            return
        with folder.locked(directory) as lock:
            plan = folder.agreed(directory, plan)
            print(f"profilemate: the runs go to {directory}", file=sys.stderr)
            try:
                interrupts = running.Interrupts()
                with interrupts.caught():
                    sweeping.sweep(
                        plan,
                        directory,
                        lock=lock,
                        interrupts=interrupts,
                        time_limit=timeout or None,
                        retry_failed=retry_failed,
                    )
            except KeyboardInterrupt:
                print(
                    f"profilemate: stopped; the same command with --output {directory} goes on",
                    file=sys.stderr,
                )
                raise typer.Exit(130) from None
            except OSError as error:
                raise RuleError(
                    f"cannot go on in {directory}: {error.strerror or error}; when that is mended, "
                    f"the same command with --output {directory} goes on"
                ) from None
            found = results.read(directory)
            _write_files(directory, found)
            _show(found, as_json=as_json)
    if any(run.state != "done" for run in found.runs):
        raise typer.Exit(1)


def _plan(
    command: Sequence[str],
    sets: Sequence[str],
    listed: Path | None,
    repeat: int,
    baseline: str | None,
    batch_size: int,
) -> Plan:
    from profilemate.sweep import baseline as baselines
    from profilemate.sweep import settings
    from profilemate.sweep.folder import Plan

    if baseline is not None and baseline not in baselines.KINDS:
        raise RuleError(f"--baseline {baseline} is not known; {', '.join(baselines.KINDS)} is")
    if not 1 <= repeat <= MOST_REPEATS:
        raise RuleError(f"--repeat is {repeat}; give a number from 1 to {MOST_REPEATS}")
    if batch_size < 1:
        raise RuleError("--baseline-batch is 0; give a number from 1 on")
    combinations = settings.combinations(sets, listed)
    if combinations == ({},) and repeat == 1 and baseline is None:
        raise RuleError("nothing to sweep; give --set max-num-seqs=1,4,16, --list or --repeat")
    settings.check_command(command, combinations[0])
    if baseline is None:
        return Plan(tuple(command), combinations, repeat)
    baselines.check(command, combinations[0])
    return Plan(tuple(command), combinations, repeat, {"kind": baseline, "batch_size": batch_size})


def _write_files(directory: Path, found: Sweep) -> None:
    """The table and the runs as CSV, and the chart."""
    from analysis.renderers import sweep_csv

    write(directory / TABLE_FILE, sweep_csv.table(found))
    write(directory / RUNS_FILE, sweep_csv.runs(found))
    try:
        from analysis.renderers.html import sweep as page
    except ModuleNotFoundError as error:
        if error.name != "plotly":
            raise
        print(
            "profilemate: no chart, plotly is not installed: pip install 'profilemate[report]'",
            file=sys.stderr,
        )
        return
    write(directory / CHART_FILE, page.render(found))


def _show(found: Sweep, *, as_json: bool) -> None:
    from analysis.renderers import json
    from analysis.renderers.text import sweep as text

    # A name that the terminal's encoding cannot show must not end it.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if as_json:
        print(json.render(found))
    else:
        text.write(found, sys.stdout)
