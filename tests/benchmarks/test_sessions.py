# SPDX-License-Identifier: Apache-2.0
"""A benchmark counts what is in closed segments, too."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from benchmarks import recordings, sessions
from benchmarks.result import BenchmarkError

MOVES = "kv_cache_allocations"
STEPS = "scheduler_steps"


def session(folder: Path) -> Path:
    """One of two closed segments and an open one. Opening rows only explain a beginning."""
    parts = {
        f"segments/0001/{MOVES}.0001.csv": "event,num_blocks\nallocate,1\nreset,64\n",
        f"segments/0002/{MOVES}.0002.csv": "event,num_blocks\nreuse,2\ncache,4\n",
        f"segments/0002/opening.{MOVES}.csv": "event,num_blocks\nallocate,128\n",
        f"{MOVES}.csv": "event,num_blocks\nfree,8\n",
        f"segments/0002/{STEPS}.0002.csv": "repeats\n1\n3\n",
        f"{STEPS}.csv": "repeats\n2\n",
    }
    for name, text in parts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent == folder:
            path.write_text(text)
        else:
            Path(f"{path}.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def test_block_events(tmp_path: Path) -> None:
    assert recordings.block_events(session(tmp_path)) == 15


def test_steps(tmp_path: Path) -> None:
    sessions.check_steps(session(tmp_path), 6)
    with pytest.raises(BenchmarkError, match="6 of 5 steps"):
        sessions.check_steps(tmp_path, 5)
