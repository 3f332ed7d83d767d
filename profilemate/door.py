# SPDX-License-Identifier: Apache-2.0
"""Which folder is to be put on PYTHONPATH? The one with ``sitecustomize.py``.

In a clone, and in a folder that ``profilemate inject`` made, that is the folder of the package.
Installed beside the package, ``sitecustomize.py`` would run in every Python of that environment, so
a wheel puts it into a folder of its own.
"""

from __future__ import annotations

import os

from profilemate import ROOT

FILE = "sitecustomize.py"


def folder() -> str:
    """The folder's absolute path; ``ROOT`` where there is no such file."""
    if os.path.isfile(os.path.join(ROOT, FILE)):
        return ROOT
    # Only an installed package needs this import, which takes milliseconds.
    from importlib.metadata import PackageNotFoundError, files

    try:
        found = [str(each.locate()) for each in files("profilemate") or () if each.name == FILE]
    except PackageNotFoundError:
        found = []
    return os.path.dirname(os.path.normpath(found[0])) if found else ROOT


def pythonpath(before: str | None) -> str:
    """PYTHONPATH with the folder first. ``before``: what it is now."""
    others = [entry for entry in (before or "").split(os.pathsep) if entry]
    return os.pathsep.join([folder(), *(entry for entry in others if entry != folder())])
