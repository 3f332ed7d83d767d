# SPDX-License-Identifier: Apache-2.0
"""Start the collector of a session beside vLLM, as nobody's child."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from profilemate.messages import say

_ROOT = Path(__file__).resolve().parent.parent.parent
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from profilemate.collector.__main__ import main; main(sys.argv[2], detach=True)"
)


START_SEC = 30
"""How long the collector may take to start and detach itself."""


def start(directory: Path) -> None:
    """Start a collector for the session; it ends at once where one is already running.

    The process detaches itself from ours (vLLM kills its descendants at shutdown, and waits for
    some), so all that we wait for is the interpreter's start. Isolated mode keeps the user's
    PYTHONPATH, working directory and our own sitecustomize out of it.
    """
    command = [sys.executable, "-I", "-c", _PROGRAM, str(_ROOT), str(directory)]
    try:
        subprocess.run(
            command,
            cwd="/",
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            timeout=START_SEC,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        say(
            f"no collector ({error.__class__.__name__}); the events are kept: "
            f"'profilemate finalize {directory}' makes the tables"
        )


def _environment() -> dict[str, str]:
    kept = ("PATH", "LD_LIBRARY_PATH", "TMPDIR", "HOME", "LANG", "SYSTEMROOT")
    return {name: os.environ[name] for name in kept if name in os.environ}
