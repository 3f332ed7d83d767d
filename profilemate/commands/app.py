# SPDX-License-Identifier: Apache-2.0
"""Put the commands together: ``profilemate COMMAND``, or one of them as a program of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Any, get_type_hints

import typer

from profilemate import __version__
from profilemate.commands.shared.errors import errors_in_one_line


def application(
    name: str | None, asked: str | None = None, *, completes: bool = False
) -> typer.Typer:
    """All commands, or the one with this name as a program of its own.

    Args:
        name: the command; None for all.
        asked: the first word of the command line. Where it is a command, no other is imported.
        completes: whether it can install itself into a shell's completion.

    """
    # Plain help reads the same in a terminal, a pipe and a log.
    app = typer.Typer(
        add_completion=completes, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    if name is not None:
        app.command()(_command(name, *_COMMANDS[name]))
        return app
    app.callback(invoke_without_command=True)(_profilemate)
    for each in [asked] if asked is not None and asked in _COMMANDS else _COMMANDS:
        app.command(each, context_settings=_SETTINGS.get(each))(_command(each, *_COMMANDS[each]))
    if asked not in _COMMANDS:
        app.add_typer(_group(_export, _EXPORTS), name="export")
    return app


def _group(help_of: Callable[..., None], commands: Mapping[str, tuple[str, str]]) -> typer.Typer:
    """Commands under one name. The docstring of ``help_of`` is its help."""
    group = typer.Typer(rich_markup_mode=None)
    group.callback(invoke_without_command=True)(help_of)
    for name, where in commands.items():
        group.command(name)(_command(name, *where))
    return group


def _command(name: str, module: str, options_name: str) -> Callable[..., None]:
    """The function that typer calls. Its parameters are the fields of the options, and its help
    is the docstring of the work."""
    home = import_module(f"profilemate.commands.{module}")
    work: Callable[[Any], int] = getattr(home, name)
    options: type[Any] = getattr(home, options_name)

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


_COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("run", "RunOptions"),
    "inject": ("inject", "InjectOptions"),
    "summary": ("summary", "SummaryOptions"),
    "report": ("report", "ReportOptions"),
    "compare": ("compare", "CompareOptions"),
    "check": ("check", "CheckOptions"),
    "finalize": ("finalize", "FinalizeOptions"),
    "join": ("join", "JoinOptions"),
    "snapshot": ("snapshot", "SnapshotOptions"),
    "pack": ("pack", "PackOptions"),
    "unpack": ("pack", "UnpackOptions"),
    "pause": ("pause", "PauseOptions"),
    "resume": ("pause", "PauseOptions"),
    "mark": ("mark", "MarkOptions"),
    "doctor": ("doctor", "DoctorOptions"),
    "plan": ("plan", "PlanOptions"),
    "sweep": ("sweep", "SweepOptions"),
    "reconcile": ("reconcile", "ReconcileOptions"),
    "whatif": ("whatif", "WhatifOptions"),
    "route": ("route", "RouteOptions"),
    "live": ("live", "LiveOptions"),
    "metrics": ("metrics", "MetricsOptions"),
    "fleet": ("fleet", "FleetOptions"),
}
"""By name: the module of ``profilemate.commands`` that has its function, and its options."""

_EXPORTS: Mapping[str, tuple[str, str]] = {
    "perfetto": ("export_perfetto", "PerfettoOptions"),
    "load": ("export_load", "LoadOptions"),
    "otlp": ("export_otlp", "OtlpOptions"),
}
"""The same of the commands of ``export``."""

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
      profilemate export load              what was asked, to be replayed
      profilemate export otlp              requests as spans, for OpenTelemetry

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
