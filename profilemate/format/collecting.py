# SPDX-License-Identifier: Apache-2.0
"""The collector's command, for those who run it and know no more of it.

    SESSION               follow a session to its end
    --detach SESSION      the same, in a process that is nobody's child; the command ends at once
    --complete SESSION    make the tables of a session that has ended

The exit code of ``--complete`` says what the session is: ``COMPLETE``, ``RUNNING``, or
``CANNOT_COMPLETE``, for which one line on stderr gives the reason. Where a session runs, a line
there says what is odd about that, if anything is.
"""

from __future__ import annotations

import sys

from profilemate import ROOT

COMPLETE, CANNOT_COMPLETE, RUNNING = 0, 2, 3

MODULE = "profilemate.collector"

_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); import profilemate; del sys.path[0]; "
    f"import runpy; runpy.run_module({MODULE!r}, run_name='__main__', alter_sys=True)"
)


def command(*arguments: str) -> list[str]:
    """The command line that runs the collector of this very profilemate.

    Isolated mode keeps PYTHONPATH, the working directory and our own sitecustomize out of it.
    """
    return [sys.executable, "-I", "-c", _PROGRAM, ROOT, *arguments]
