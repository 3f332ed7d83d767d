# SPDX-License-Identifier: Apache-2.0
"""What a process took is its own, and nothing of whoever started it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.processes import measured
from benchmarks.result import BenchmarkError


def run(code: str) -> float:
    return measured([sys.executable, "-S", "-c", code], os.environ, Path.cwd()).peak_bytes


def test_memory_is_that_of_the_command() -> None:
    ballast = b"x" * 300_000_000
    bare = run("pass")
    assert bare < 100_000_000
    assert run("held = b'x' * 200_000_000") > bare + 190_000_000
    assert len(ballast) == 300_000_000


def test_failure_says_why() -> None:
    with pytest.raises(BenchmarkError, match=r"ended with 1: .*ValueError: broken"):
        run("raise ValueError('broken')")


def test_it_is_pinned_to_a_core(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os; open({str(tmp_path / 'on')!r}, 'w').write(str(os.sched_getaffinity(0)))"
    measured([sys.executable, "-S", "-c", code], os.environ, Path.cwd(), core)
    assert (tmp_path / "on").read_text() == f"{{{core}}}"
    measured([sys.executable, "-S", "-c", code], os.environ, Path.cwd())
    assert (tmp_path / "on").read_text() == str(os.sched_getaffinity(0))
