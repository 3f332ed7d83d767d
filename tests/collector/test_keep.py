# SPDX-License-Identifier: Apache-2.0
"""What a session takes on the disk while it is recorded: no more than is to be kept, and a
segment."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profilemate.collector import follow, rotation, segments
from profilemate.collector.snapshots import Asked
from profilemate.format import journal
from profilemate.format.folder import Folder
from tests.kv.recording import hooks_only, only_session
from tests.support.scheduler import RequestMaker, build_scheduler, step, tokens

KEPT = 800_000
SEGMENT = KEPT // rotation.SEGMENTS_KEPT
ROUNDS = 60
"""So many rounds of the collector pass while a segment is packed."""


class Sizes:
    """Looks at the session after each call that changes a file, in whichever thread."""

    def __init__(self) -> None:
        self.most = 0
        self.session: Path | None = None
        self._lock = threading.Lock()

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("write", "fsync", "rename", "replace", "unlink", "rmdir", "ftruncate"):
            patch.setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **kwargs: Any) -> Any:
            # Nothing moves while it is looked at.
            with self._lock:
                result = call(*args, **kwargs)
                if self.session is not None:
                    self.most = max(self.most, taken(self.session))
            return result

        return instead


def taken(folder: Path) -> int:
    """What ``du`` says, or the lengths of the files, where they are more."""
    infos = [os.stat(Path(at, name)) for at, _, names in os.walk(folder) for name in names]
    return sum(max(info.st_size, 512 * info.st_blocks) for info in infos)


@pytest.mark.parametrize("slow", [False, True])
def test_a_session_never_takes_more(
    model: Path, hooks_on: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, slow: bool
) -> None:
    """Of the real scheduler, at each file operation, also while a segment takes long to pack."""
    for module, name, value in (
        (journal, "FILE_BYTES", 20_000),
        (rotation, "LEAST_BYTES", 20_000),
        (rotation, "LOOK_SEC", 3600.0),
        (follow, "MERGE_NS", 0),
        (follow, "POLL_SEC", 0.0),
        (follow, "PACKING_SEC", 0.001),
    ):
        monkeypatch.setattr(module, name, value)
    sizes, packing = Sizes(), threading.Semaphore(0)
    pack = segments._pack

    def slowly(*args: Any) -> None:
        for _ in range(ROUNDS):
            packing.acquire(timeout=60)
        pack(*args)

    if slow:
        monkeypatch.setattr(segments, "_pack", slowly)
    with hooks_only(tmp_path, thread=False):
        monkeypatch.setenv("VLLM_PROFILING_KEEP", f"{KEPT / 1e6}MB")
        scheduler = build_scheduler(model, 200, max_num_seqs=8, enable_prefix_caching=True)
        session = only_session(tmp_path)
        with Folder.own(session) as folder, folder.folder("journal") as journals:
            work = follow._Work(folder, journals, Asked())
            make, number = RequestMaker(), 0
            sizes.watch(monkeypatch)
            sizes.session = session
            follower = work.follower
            while follower.tables.bytes_written < 5 * KEPT or not follower.segments.closed:
                while len(scheduler.requests) < 10:
                    number += 1
                    scheduler.add_request(make(f"request-{number}", tokens(number, 200), 4))
                step(scheduler)
                work._once()
                if follower.segments.is_closing:
                    packing.release()
            sizes.session = None
            packing.release(10_000)
            assert follower.segments.closed[0].number > 8
            while follower.segments.is_closing:
                work._once()
    assert 0.8 * KEPT < sizes.most <= KEPT + SEGMENT
