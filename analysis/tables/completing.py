# SPDX-License-Identifier: Apache-2.0
"""Complete a session that was cut off, and say what it is now.

profilemate's collector does it, in a process of its own: its command, its exit code and the
session's folder are all that is known of it here.
"""

from __future__ import annotations

import os
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from profilemate.format import collecting

LONGEST_SEC = 7 * 86_400
"""How long completing may take. Without a limit Ctrl-C would have no effect: Python would wait in a
read, which goes on where Polars has put its handler of SIGINT."""

State = Literal["complete", "running", "cut off"]


def complete(folder: Path) -> tuple[State, str | None]:
    """Complete the session if all of its processes have ended.

    Returns:
        What the session is, and one sentence where it is not complete.

    """
    # The collector follows no link to a session's folder.
    target = os.path.realpath(folder)
    if find_spec(collecting.MODULE) is None:
        return "cut off", "profilemate's collector is not there to complete it"
    try:
        code, reason = _run(collecting.command("--complete", target))
    except OSError as error:
        code, reason = collecting.CANNOT_COMPLETE, str(error)
    if code == collecting.COMPLETE:
        return "complete", None
    if code == collecting.RUNNING:
        up_to = "what follows goes up to its last finished line"
        return "running", up_to if reason is None else f"{up_to}: {reason}"
    reason = reason or f"the collector ended with exit code {code}"
    return "cut off", f"its tables could not be completed: {reason}"


def _run(command: list[str]) -> tuple[int, str | None]:
    """Run the command to its end; its exit code, and the last line that it wrote, if any.

    Ctrl-C in a terminal reaches this process alone, which then ends the command, and waits until it
    has removed what it had begun.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=LONGEST_SEC)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    code = process.returncode
    if code < 0:
        return code, f"the collector was ended by {signal.Signals(-code).name}"
    lines = os.fsdecode(said).strip().splitlines()
    return code, lines[-1] if lines else None
