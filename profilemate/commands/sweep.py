# SPDX-License-Identifier: Apache-2.0
"""``profilemate sweep``: one command under many settings, each run profiled, and their table."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.errors import RuleError
from profilemate.commands import sweep_files
from profilemate.commands.shared.options import AsJson
from profilemate.commands.shared.stdout import show
from profilemate.commands.shared.values import count, seconds, whole
from profilemate.messages import say

if TYPE_CHECKING:
    from profilemate.sweep.folder import Plan

MOST_REPEATS = 1000
STOPPED = 130
"""The exit code of a command that Ctrl-C ended."""


@dataclass(frozen=True)
class SweepOptions:
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            help="The command to run, after '--': vllm bench throughput --model MODEL.",
            show_default=False,
        ),
    ]
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUES",
            help="Values of a flag, with commas between them: max-num-seqs=1,4,16. With several "
            "--set, every combination is run.",
            show_default=False,
        ),
    ] = None
    listed: Annotated[
        Path | None,
        typer.Option(
            "--list",
            metavar="FILE",
            help="A file of combinations, one a line: max-num-seqs=4 block-size=16.",
            show_default=False,
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="The folder for the runs. A sweep that was stopped goes on in its folder. "
            "Default: a new folder in the current one.",
            show_default=False,
        ),
    ] = None
    repeat: Annotated[
        int,
        typer.Option(
            "--repeat",
            metavar="N",
            parser=count,
            help="Run each combination N times. Default: once.",
            show_default=False,
        ),
    ] = 1
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="TIME",
            parser=seconds,
            help="Stop a run that takes longer: 10m, 1h.",
            show_default=False,
        ),
    ] = 0.0
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Repeat the runs that failed.")
    ] = False
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="hf",
            help="Answer the prompts of 'vllm bench throughput' with Hugging Face's generate(), "
            "too, and show the speed-up.",
            show_default=False,
        ),
    ] = None
    baseline_batch: Annotated[
        int,
        typer.Option(
            "--baseline-batch",
            metavar="N",
            parser=count,
            help="Prompts that the baseline answers at once. Default: 8.",
            show_default=False,
        ),
    ] = 8
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Make the runs on the machines of this Ray cluster, as many at once as there is "
            "room for: host:port, or auto.",
            show_default=False,
        ),
    ] = None
    gpus_per_run: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-run",
            metavar="N",
            parser=whole,
            help="With --ray: the GPUs that each run needs, all on one machine. Default: 1.",
            show_default=False,
        ),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print each run's command, and run nothing.")
    ] = False
    as_json: AsJson = False


def sweep(options: SweepOptions) -> int:
    """Run a command under many settings, and compare the runs.

    Each combination is a run of its own, profiled into a folder of its own. A setting is appended
    to the command as a flag. Where the command has a placeholder such as {max-num-seqs}, the value
    replaces it; {run} stands for the run's folder. The sweep goes on after a run that failed, and
    says why it failed.

    \b
    Examples:
      profilemate sweep --set max-num-seqs=1,4,16,64 --set block-size=16,32 \\
          -- vllm bench throughput --model MODEL --input-len 512
      profilemate sweep --repeat 3 --baseline hf -o lab --set max-num-seqs=1,16 \\
          -- vllm bench throughput --model MODEL --input-len 512
      profilemate sweep -o lab ... -- vllm bench ...     goes on where it stopped
      profilemate sweep --ray auto --gpus-per-run 2 --set max-num-seqs=64,256 \\
          -- vllm bench throughput --model MODEL --tensor-parallel-size 2
      profilemate sweep --set max-num-seqs=4,8 -- sh serve-and-bench.sh

    \b
    Exit codes:
      0     every run is done
      1     a run failed
      2     a wrong option, another sweep's folder, or a folder that cannot be
            written
      130   the sweep was stopped; the same command goes on with it
    """
    from analysis import sweep as results
    from analysis.renderers.text import sweep as text
    from profilemate.sweep import folder, sweeping

    if options.output == Path("-"):
        raise RuleError("--output -: runs go to a folder, not to stdout; name a folder")
    plan = _plan(options)
    directory = (options.output or Path(time.strftime("sweep_%Y%m%d_%H%M%S"))).absolute()
    if options.dry_run:
        for line in sweeping.commands(plan, directory):
            print(line)
        return 0
    with folder.locked(directory) as lock:
        plan = folder.agreed(directory, plan)
        say(f"the runs go to {directory}")
        try:
            _make_runs(plan, directory, lock, options)
        except KeyboardInterrupt:
            say(f"stopped; to go on, repeat the command with --output {directory}")
            return STOPPED
        found = results.read(directory)
        sweep_files.write_all(directory, found)
    show(found, text.write, as_json=options.as_json)
    return 0 if all(run.state == "done" for run in found.runs) else 1


def _plan(options: SweepOptions) -> Plan:
    """What is swept.

    Raises:
        RuleError: the options make no sense.

    """
    from profilemate.sweep import baseline as baselines
    from profilemate.sweep import settings
    from profilemate.sweep.folder import Plan

    command, repeat, baseline = options.command, options.repeat, options.baseline
    if baseline is not None and baseline not in baselines.KINDS:
        raise RuleError(f"--baseline {baseline} is not known; give {' or '.join(baselines.KINDS)}")
    if not 1 <= repeat <= MOST_REPEATS:
        raise RuleError(f"--repeat is {repeat}; give a number from 1 to {MOST_REPEATS}")
    if options.gpus_per_run is not None and options.ray is None:
        raise RuleError("--gpus-per-run says what a run takes of a cluster; give --ray, too")
    if options.baseline_batch < 1:
        raise RuleError("--baseline-batch is 0; give a number from 1 on")
    combinations = settings.combinations(options.sets or (), options.listed)
    if combinations == ({},) and repeat == 1 and baseline is None:
        raise RuleError("nothing to sweep; give --set max-num-seqs=1,4,16, --list or --repeat")
    settings.check_command(command, combinations[0])
    if baseline is None:
        return Plan(tuple(command), combinations, repeat)
    baselines.check(command, combinations[0])
    noted = {"kind": baseline, "batch_size": options.baseline_batch}
    return Plan(tuple(command), combinations, repeat, noted)


def _make_runs(plan: Plan, directory: Path, lock: int, options: SweepOptions) -> None:
    """Make every run that has no result yet.

    Raises:
        KeyboardInterrupt: the user, or the system, stops the sweep.
        RuleError: the folder cannot be written.

    """
    from profilemate.sweep import running, sweeping

    interrupts = running.Interrupts()
    try:
        with interrupts.caught():
            if options.ray is not None:
                _on_cluster(plan, directory, options, options.ray)
                return
            sweeping.sweep(
                plan,
                directory,
                lock=lock,
                interrupts=interrupts,
                time_limit=options.timeout or None,
                retry_failed=options.retry_failed,
            )
    except OSError as error:
        raise RuleError(
            f"cannot go on in {directory}: {error.strerror or error}; mend that, and repeat the "
            f"command with --output {directory}"
        ) from None


def _on_cluster(plan: Plan, directory: Path, options: SweepOptions, address: str) -> None:
    from profilemate.sweep import on_cluster

    gpus = 1 if options.gpus_per_run is None else options.gpus_per_run
    on_cluster.sweep(
        on_cluster.Where(address, gpus),
        plan,
        directory,
        time_limit=options.timeout or None,
        retry_failed=options.retry_failed,
    )
