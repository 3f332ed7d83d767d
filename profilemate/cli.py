# SPDX-License-Identifier: Apache-2.0
"""The command line: ``profilemate VERB``, and ``python -m analysis`` for the verb ``summary``.

Nothing of this runs beside vLLM. What it needs is in the extra ``analysis``, and what a page with
charts needs is in ``report``; where that is not installed, it says so in one line. So it does of
whatever nobody expected: a traceback's exit code 1 would read as "a rule failed" after ``check``.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

TRACEBACK = "PROFILEMATE_TRACEBACK"
"""Set to 1, it shows the traceback of an error that nobody expected."""

_EXTRAS = {
    "polars": "analysis",
    "typer": "analysis",
    "prometheus_client": "analysis",
    "plotly": "report",
}
"""Which extra has what may not be installed."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The verbs catch these where they write a file of their own, so they are stdout's."""


def main() -> None:
    """The console script."""
    run(None, "profilemate")


def run(verb: str | None, program: str) -> None:
    """Run the command line that is in ``sys.argv``, then exit.

    Args:
        verb: the verb that is meant without being named, or None where one has to be.
        program: what the user calls it, for the help.

    """
    _settle_streams()
    try:
        from profilemate.commands.app import application

        application(verb)(prog_name=program)
    except SystemExit:
        fault = _output_fault()
        if fault is None:
            raise
        _fail(fault)
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:  # a panic within Polars is no Exception
        _fail(_output_fault(error) or _missing(error) or _unexpected(error))


def _settle_streams() -> None:
    """End quietly when the reader of a pipe has gone, and bear a stream that was closed."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # It is for as long as the process lives.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _output_fault(ended_by: BaseException | None = None) -> str | None:
    """What is wrong with stdout, such as a full disk; what could not be written is dropped."""
    try:
        sys.stdout.flush()
        # Without a buffer (PYTHONUNBUFFERED) there is nothing left to write again.
        if isinstance(ended_by, OSError) and ended_by.errno in _FULL:
            raise ended_by
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return f"cannot write the output: {error.strerror or error}"
    return None


def _missing(error: BaseException) -> str | None:
    """How to install the package whose lack this error is."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    package = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(package)
    return extra and f"{package} is not installed: pip install 'profilemate[{extra}]'"


def _unexpected(error: BaseException) -> str:
    if os.environ.get(TRACEBACK) == "1":
        traceback.print_exception(type(error), error, error.__traceback__)
    said = " ".join(str(error).split())
    return (
        f"unexpected {type(error).__name__}{said and ': '}{said}; "
        f"please report it, with {TRACEBACK}=1 for the traceback"
    )


def _fail(text: str) -> NoReturn:
    with suppress(OSError):
        print("profilemate:", text, file=sys.stderr)
    sys.exit(2)
