# SPDX-License-Identifier: Apache-2.0
"""Take a snapshot of a session by running ``profilemate snapshot``, and say what came of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from analysis.wording.printable import printable
from profilemate import ROOT

_LAST_BYTES = 4096


class Snapshot:
    """A snapshot that is being taken, in a process of its own.

    It goes on to its end whatever becomes of this process: half a snapshot is of no use.
    """

    def __init__(self, session: Path) -> None:
        # It closes itself, and has no name that could be left behind.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
        try:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                command(session),
                env={**os.environ, "PYTHONPATH": path, "VLLM_PROFILING": "0", "NO_COLOR": "1"},
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._process, self._problem = None, str(error.strerror or error)

    def result(self) -> str | None:
        """One line on what came of it; None while it is being taken."""
        if self._process is None:
            return f"no snapshot: {self._problem}"
        code = self._process.poll()
        if code is None:
            return None
        said = self._last_lines()
        last = said[-1] if said else f"exit code {code}"
        return f"snapshot: {last}" if code == 0 else f"no snapshot: {last}"

    def _last_lines(self) -> list[str]:
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - _LAST_BYTES))
        lines = self._said.read().decode("utf-8", "replace").splitlines()
        return [printable(line) for line in lines if line.strip()]


def command(session: Path) -> list[str]:
    """The command line that takes a snapshot of this session."""
    return [sys.executable, "-m", "profilemate", "snapshot", str(session)]
