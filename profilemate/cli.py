# SPDX-License-Identifier: Apache-2.0
"""The command line: ``profilemate COMMAND``, and ``python -m analysis`` for ``summary``.

The command line runs apart from vLLM. It needs the packages of the extra ``analysis``, a page with
charts those of ``report``, and an export those of ``export``. Where one is not installed, a line
says so. An unexpected error is a line and exit code 2, too: a traceback exits with 1, which means
"a rule failed" after ``check``.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from typing import NoReturn

from profilemate.installing import pip_install
from profilemate.messages import say

TRACEBACK = "PROFILEMATE_TRACEBACK"
"""Set to 1, it shows the traceback of an unexpected error."""

_EXTRAS = {
    "analysis": "analysis",
    "polars": "analysis",
    "typer": "analysis",
    "prometheus_client": "analysis",
    "rich": "analysis",
    "textual": "analysis",
    "plotly": "report",
    "perfetto": "export",
    "tokenizers": "export",
    "opentelemetry": "export",
}
"""The extra that has a package which may be missing."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk. Commands catch these errors where they write files, so what is left is stdout's."""


def main() -> None:
    """The console script."""
    run(None, "profilemate")


def run(command: str | None, program: str) -> None:
    """Run the command line in ``sys.argv``, then exit.

    Args:
        command: the command that the program is; None where ``sys.argv`` names one.
        program: what the user calls the program, for the help.

    """
    _settle_streams()
    try:
        from profilemate.commands.app import application

        # A shell can complete one word, and not 'python -m profilemate'.
        app = application(command, *sys.argv[1:2], completes=program == "profilemate")
        app(prog_name=program)
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
    """End quietly when a pipe has no reader any more, and work with a stream that is closed."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # The file stays open as long as the process lives.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _output_fault(ended_by: BaseException | None = None) -> str | None:
    """What is wrong with stdout, such as a full disk. What cannot be written is dropped."""
    try:
        sys.stdout.flush()
        # With PYTHONUNBUFFERED nothing waits in a buffer, and the flush above succeeds.
        if isinstance(ended_by, OSError) and ended_by.errno in _FULL:
            raise ended_by
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return f"cannot write the output: {error.strerror or error}"
    return None


def _missing(error: BaseException) -> str | None:
    """How to install the package that the error misses."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    package = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(package)
    return extra and f"{package} is not installed: {pip_install(extra)}"


def _unexpected(error: BaseException) -> str:
    if os.environ.get(TRACEBACK) == "1":
        traceback.print_exception(type(error), error, error.__traceback__)
    text = " ".join(str(error).split())
    return (
        f"unexpected {type(error).__name__}{text and ': '}{text}; "
        f"please report it, with {TRACEBACK}=1 for the traceback"
    )


def _fail(text: str) -> NoReturn:
    say(text)
    sys.exit(2)
