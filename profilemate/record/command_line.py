# SPDX-License-Identifier: Apache-2.0
"""Which command line began the session?"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from profilemate.format.processes import parent_of


def root_argv(session_id: str) -> list[str]:
    """The command line of the process that made the session's name, if it is an ancestor.

    An engine runs in a child whose own command line says nothing. Elsewhere than on Linux that one
    is taken all the same.
    """
    match = re.match(r"session_\d+_\d+_(\d+)_", session_id)
    own = list(getattr(sys, "orig_argv", None) or getattr(sys, "argv", None) or [])
    if match is None:
        return own
    root, pid = int(match[1]), os.getpid()
    try:
        while pid > 1 and pid != root:
            pid = parent_of(pid)
        if pid == root:
            cmdline = Path(f"/proc/{pid}/cmdline").read_bytes()
            return [os.fsdecode(argument) for argument in cmdline.split(b"\0")[:-1]] or own
    except (OSError, ValueError):
        pass
    return own
