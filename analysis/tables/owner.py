# SPDX-License-Identifier: Apache-2.0
"""Whose session is it? Another user's is only read."""

from __future__ import annotations

import os
from pathlib import Path

from profilemate.format.folder import owner_of


def is_own(folder: Path) -> bool:
    """Whether the folder, and the link that leads to it, are the user's own."""
    return another(folder) is None


def another(folder: Path) -> str | None:
    """The name of the other user whose folder, or whose link to it, this is."""
    for info in (os.lstat(folder), os.stat(folder)):
        if info.st_uid != os.geteuid():
            return owner_of(info)
    return None
