# SPDX-License-Identifier: Apache-2.0
"""The command line: ``profilemate VERB``, and ``python -m analysis`` for the verb ``summary``.

Nothing of this runs beside vLLM. What it needs is in the extra ``analysis``, and what a page with
charts needs is in ``report``; where that is not installed, it says so in one line.
"""

from __future__ import annotations

import sys

_EXTRAS = {"polars": "analysis", "typer": "analysis", "plotly": "report"}
"""Which extra has what may not be installed."""


def main() -> None:
    """The console script."""
    run(None, "profilemate")


def run(verb: str | None, program: str) -> None:
    """Run the command line that is in ``sys.argv``, then exit.

    Args:
        verb: the verb that is meant without being named, or None where one has to be.
        program: what the user calls it, for the help.

    """
    try:
        from profilemate.commands.app import application

        application(verb)(prog_name=program)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = _EXTRAS.get(package)
        if extra is None:
            raise
        print(
            f"profilemate: {package} is not installed: pip install 'profilemate[{extra}]'",
            file=sys.stderr,
        )
        sys.exit(2)
