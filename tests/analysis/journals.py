# SPDX-License-Identifier: Apache-2.0
"""Sessions whose tables are not complete: a real journal, of a process that lives or does not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from profilemate.format import processes
from profilemate.format.events import Op
from profilemate.record import encode
from profilemate.record.claim import claim
from profilemate.record.recorder import Recorder

NAME = "session_20260131_120000_4711_c0ffee"


def running_session(base: Path) -> Path:
    """A session of two steps, recorded by this very process, which goes on."""
    return _record(base, os.getpid())


def ended_session(base: Path) -> Path:
    """The same session, whose process was killed before a collector saw any of it."""
    process = subprocess.run(
        [sys.executable, "-S", "-c", "import os; print(os.getpid())"],
        capture_output=True,
        check=True,
    )
    return _record(base, int(process.stdout))


def _record(base: Path, pid: int) -> Path:
    place = claim(base, NAME, "engine0")
    header = {
        "producer": "engine",
        "rank": 0,
        "pid": pid,
        "start": processes.start_of(pid) or "0",
        "hooks": [],
        "versions": {"vllm": "0.32.0"},
        "pools": [{"blocks": 11, "null": 0}],
        "groups": [{"kind": "FullAttentionSpec", "block_size": 16, "pool": 0}],
        "caching": True,
        "hash_block_size": 16,
        "told_by_content": 16,
        "content_ids_shared": True,
        "model": {"name": "tiny"},
        "cache": {"block_size": [16], "blocks": 11, "max_model_len": 100, "tokens": 176},
        "parallel": {"tensor": 1, "pipeline": 1, "data": 1},
        "scheduler": {},
    }
    recorder = Recorder(place.fd, header, "engine 0")
    allocate(recorder, [1, 2, 3], free=7)
    allocate(recorder, [4], free=6)
    recorder.forget()
    return place.directory


def allocate(recorder: Recorder, blocks: list[int], *, free: int) -> None:
    """One step that hands out these blocks and leaves so many free."""
    now, handed_out = time.monotonic_ns(), [SimpleNamespace(block_id=block) for block in blocks]
    recorder.keep((encode.blocks, Op.ALLOCATE, now, *handed_out))
    running, waiting, tokens, prefill, scheduled = 1, 0, 16, 16, 1
    step = running, waiting, tokens, prefill, scheduled, free
    recorder.keep((encode.between, Op.STEP, now, now + 1000, step))
    recorder.flush()
