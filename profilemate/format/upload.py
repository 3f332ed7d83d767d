# SPDX-License-Identifier: Apache-2.0
"""What is known of an upload by who starts it and by who reads its session.

The uploader is a process of its own, which the collector starts: ``uploader(SESSION, URL)``.
"""

from __future__ import annotations

import sys

from profilemate import ROOT

UPLOAD_FILE = "upload.json"
"""In the session's folder how far it is, and in the bucket whether all of the session is there."""

LOCK_FILE = "uploader.lock"
"""In the journal folder, locked by the uploader as long as it works."""

MISSING = 3
"""The uploader's exit code where it lacks a package: to start it again does not help."""

_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "import runpy; runpy.run_module('profilemate.upload', run_name='__main__', alter_sys=True)"
)


def uploader(session: str, url: str) -> list[str]:
    """The command line that uploads this session to ``url/NAME OF THE SESSION``."""
    return [sys.executable, "-I", "-c", _PROGRAM, ROOT, session, url]
