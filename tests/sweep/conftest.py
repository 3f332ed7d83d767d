# SPDX-License-Identifier: Apache-2.0
"""A sweep of ``fake_vllm.py`` in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.analysis.invoke import invoke

ROOT = Path(__file__).resolve().parent.parent.parent
FAKE = Path(__file__).with_name("fake_vllm.py")


@dataclass(frozen=True)
class Shell:
    """A folder in which ``profilemate sweep`` is called; its sweep is in ``lab``."""

    folder: Path

    @property
    def lab(self) -> Path:
        return self.folder / "lab"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """The command, in a process of its own, which signals can reach."""
        return subprocess.Popen(
            [sys.executable, "-m", "profilemate", "sweep", *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def sweep(self, *arguments: str, ends: str = "well") -> subprocess.CompletedProcess[str]:
        """Sweep the stand-in to its end; it and its options come last."""
        return self.run(*arguments, "--", sys.executable, str(FAKE), "--ends", ends)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command, in this process."""
        return invoke("sweep", "-o", self.lab, *arguments)

    def results(self) -> dict[str, dict[str, Any]]:
        """Every run's result, by the name of its folder."""
        return {
            path.parent.name: json.loads(path.read_text())
            for path in sorted(self.lab.glob("*/result.json"))
        }


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)
