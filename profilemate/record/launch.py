# SPDX-License-Identifier: Apache-2.0
"""Start the collector of a session beside vLLM, as nobody's child."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from profilemate.config import METRICS, SNAPSHOT_LAST, SNAPSHOT_LIMIT, SNAPSHOT_WHEN, UPLOAD
from profilemate.format.collecting import command
from profilemate.messages import say

START_SEC = 30
"""How long the collector may take to start and detach itself."""

_KEPT = (
    *("PATH", "LD_LIBRARY_PATH", "TMPDIR", "HOME", "LANG", "SYSTEMROOT"),
    *(METRICS, SNAPSHOT_WHEN, SNAPSHOT_LIMIT, SNAPSHOT_LAST, UPLOAD),
)
"""Variables of the environment that the collector gets."""

_FOR_UPLOADS = re.compile(
    r"AWS_.*|AZURE_.*|GOOGLE_.*|SSL_CERT_(FILE|DIR)|((HTTPS?|ALL|NO)_PROXY|(https?|all|no)_proxy)"
)
"""Those that it gets, too, where sessions are uploaded."""


def start(directory: Path) -> None:
    """Start a collector for the session; it ends at once where one is already running.

    The process detaches itself from ours, since vLLM kills its descendants at shutdown and waits
    for some of them. So we wait only for the interpreter's start.
    """
    try:
        subprocess.run(
            command("--detach", str(directory)),
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
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    if kept.get(UPLOAD):
        kept |= {name: text for name, text in os.environ.items() if _FOR_UPLOADS.fullmatch(name)}
    return kept
