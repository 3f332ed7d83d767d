# SPDX-License-Identifier: Apache-2.0
"""Put the verbs together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from profilemate import __version__
from profilemate.commands.check import check
from profilemate.commands.compare import compare
from profilemate.commands.doctor import doctor
from profilemate.commands.finalize import finalize
from profilemate.commands.plan import plan
from profilemate.commands.reconcile import reconcile
from profilemate.commands.report import report
from profilemate.commands.summary import summary
from profilemate.commands.sweep import sweep
from profilemate.commands.whatif import whatif

_VERBS: Mapping[str, Callable[..., None]] = {
    "summary": summary,
    "report": report,
    "compare": compare,
    "check": check,
    "finalize": finalize,
    "doctor": doctor,
    "plan": plan,
    "sweep": sweep,
    "reconcile": reconcile,
    "whatif": whatif,
}

_SETTINGS: Mapping[str, dict[str, Any]] = {
    # What follows the command that it runs is the command's.
    "sweep": {"allow_interspersed_args": False},
}


def application(verb: str | None) -> typer.Typer:
    """All verbs, or the one named as a program of its own."""
    # Plain help reads the same in a terminal, a pipe and a log.
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    if verb is not None:
        app.command()(_VERBS[verb])
        return app
    app.callback(invoke_without_command=True)(_profilemate)
    for name, function in _VERBS.items():
        app.command(name, context_settings=_SETTINGS.get(name))(function)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"profilemate {__version__}")
        raise typer.Exit


def _profilemate(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """See where vLLM's KV cache goes.

    Put profilemate on PYTHONPATH, run vLLM as ever, then ask what happened.

    \b
      export PYTHONPATH=/path/to/profilemate:$PYTHONPATH
      vllm serve MODEL
      profilemate summary
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
