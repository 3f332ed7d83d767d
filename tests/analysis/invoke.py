# SPDX-License-Identifier: Apache-2.0
"""Run a command in this process, which saves the start of an interpreter."""

from __future__ import annotations

import os
import subprocess
from unittest import mock

from typer.testing import CliRunner

from profilemate.commands.app import application


def invoke(*arguments: object) -> subprocess.CompletedProcess[str]:
    """``profilemate ARGUMENTS`` into pipes of 80 columns."""
    words = [str(argument) for argument in arguments]
    # What a command sets is for its own process.
    with mock.patch.dict(os.environ):
        result = CliRunner(env={"COLUMNS": "80"}).invoke(
            application(None), words, prog_name="profilemate", catch_exceptions=False
        )
    return subprocess.CompletedProcess(words, result.exit_code, result.stdout, result.stderr)
