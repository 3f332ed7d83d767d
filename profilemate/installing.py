# SPDX-License-Identifier: Apache-2.0
"""How are packages installed that a command misses?"""

from __future__ import annotations

import os
import shlex

from profilemate import ROOT


def pip_install(extra: str) -> str:
    """The command that installs an extra of pyproject.toml. No index has profilemate yet, so it
    names the clone: this one, where it is one."""
    is_clone = os.path.exists(os.path.join(ROOT, "pyproject.toml"))
    return f"pip install {shlex.quote(f'{ROOT if is_clone else CLONE}[{extra}]')}"


CLONE = "/path/to/profilemate"
"""Stands for a clone, as in the docs."""
