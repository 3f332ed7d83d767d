# SPDX-License-Identifier: Apache-2.0
"""Put the commands together: ``profilemate COMMAND``, or one of them as a program of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from profilemate import __version__
from profilemate.commands.check import CheckOptions, check
from profilemate.commands.compare import CompareOptions, compare
from profilemate.commands.doctor import DoctorOptions, doctor
from profilemate.commands.export_perfetto import PerfettoOptions, perfetto
from profilemate.commands.finalize import FinalizeOptions, finalize
from profilemate.commands.inject import InjectOptions, inject
from profilemate.commands.live import LiveOptions, live
from profilemate.commands.mark import MarkOptions, mark
from profilemate.commands.metrics import MetricsOptions, metrics
from profilemate.commands.pause import PauseOptions, pause, resume
from profilemate.commands.plan import PlanOptions, plan
from profilemate.commands.reconcile import ReconcileOptions, reconcile
from profilemate.commands.report import ReportOptions, report
from profilemate.commands.run import RunOptions, run
from profilemate.commands.shared.errors import errors_in_one_line
from profilemate.commands.snapshot import SnapshotOptions, snapshot
from profilemate.commands.summary import SummaryOptions, summary
from profilemate.commands.sweep import SweepOptions, sweep
from profilemate.commands.whatif import WhatifOptions, whatif

Options = TypeVar("Options")


def application(name: str | None) -> typer.Typer:
    """All commands, or the one with this name as a program of its own."""
    # Plain help reads the same in a terminal, a pipe and a log.
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    if name is not None:
        app.command()(_COMMANDS[name])
        return app
    app.callback(invoke_without_command=True)(_profilemate)
    for name, function in _COMMANDS.items():
        app.command(name, context_settings=_SETTINGS.get(name))(function)
    app.add_typer(_group(_export, _EXPORTS), name="export")
    return app


def _group(
    help_of: Callable[..., None], commands: Mapping[str, Callable[..., None]]
) -> typer.Typer:
    """Commands under one name. The docstring of ``help_of`` is its help."""
    group = typer.Typer(rich_markup_mode=None)
    group.callback(invoke_without_command=True)(help_of)
    for name, function in commands.items():
        group.command(name)(function)
    return group


def _command(work: Callable[[Options], int], options: type[Options]) -> Callable[..., None]:
    """The function that typer calls. Its parameters are the fields of the options, and its help
    is the docstring of the work."""

    def command(**given: Any) -> None:
        with errors_in_one_line():
            raise typer.Exit(work(options(**given)))

    hints = get_type_hints(options, include_extras=True)
    fields = inspect.signature(options).parameters.values()
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [field.replace(annotation=hints[field.name]) for field in fields]
    )
    command.__doc__ = work.__doc__
    return command


_COMMANDS: Mapping[str, Callable[..., None]] = {
    "run": _command(run, RunOptions),
    "inject": _command(inject, InjectOptions),
    "summary": _command(summary, SummaryOptions),
    "report": _command(report, ReportOptions),
    "compare": _command(compare, CompareOptions),
    "check": _command(check, CheckOptions),
    "finalize": _command(finalize, FinalizeOptions),
    "snapshot": _command(snapshot, SnapshotOptions),
    "pause": _command(pause, PauseOptions),
    "resume": _command(resume, PauseOptions),
    "mark": _command(mark, MarkOptions),
    "doctor": _command(doctor, DoctorOptions),
    "plan": _command(plan, PlanOptions),
    "sweep": _command(sweep, SweepOptions),
    "reconcile": _command(reconcile, ReconcileOptions),
    "whatif": _command(whatif, WhatifOptions),
    "live": _command(live, LiveOptions),
    "metrics": _command(metrics, MetricsOptions),
}

_EXPORTS: Mapping[str, Callable[..., None]] = {
    "perfetto": _command(perfetto, PerfettoOptions),
}

_SETTINGS: Mapping[str, dict[str, Any]] = {
    # Options after a command to start belong to that command.
    "run": {"allow_interspersed_args": False},
    "sweep": {"allow_interspersed_args": False},
}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"profilemate {__version__}")
        raise typer.Exit


def _export(context: typer.Context) -> None:
    """Write a session in another tool's format.

    \b
    Examples:
      profilemate export perfetto --help
      profilemate export perfetto          what ran, as a trace

    \b
    Exit codes:
      0   done; the last line is the path of what was written
      2   it cannot be written, or a wrong option
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _profilemate(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """See what vLLM's KV cache and CUDA graphs do.

    Put profilemate on PYTHONPATH, start vLLM as always, then ask what happened.

    \b
      export PYTHONPATH=/path/to/profilemate:$PYTHONPATH
      vllm serve MODEL
      profilemate summary
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
