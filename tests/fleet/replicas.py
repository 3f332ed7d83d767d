# SPDX-License-Identifier: Apache-2.0
"""Replicas of a deployment: real schedulers, a session each, on one wall clock."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest import mock

from tests.kv.recording import Clock, hooks_only
from tests.situations.bench import BLOCK, Engine
from tests.support.scheduler import build_scheduler

STARTED = datetime(2026, 1, 1, tzinfo=timezone.utc)
"""When all of them start."""


class Deployment:
    """Makes replicas, one after the other; each has the same seconds to itself."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self._model = model

    @contextmanager
    def replica(
        self, name: str, usable_blocks: int, *, secret: str | None = "shared", **facts: Any
    ) -> Iterator[tuple[Engine, Callable[[float], None]]]:
        """A replica on the host of this name. Its session is complete when the block has ended.

        Gives the engine, and a function that waits until so many seconds have passed.

        Args:
            name: of the host; the session is called after it.
            usable_blocks: of its pool.
            secret: its contents compare with those of replicas that have the same; None for its
                own.
            facts: of metadata.json, in place of what was recorded.

        """
        clock = Clock()
        began = clock.now
        session = self.folder / f"session_{name}"
        with hooks_only(self.folder, clock, name=session.name), self._key(secret):
            scheduler = build_scheduler(self._model, usable_blocks + 1, block_size=BLOCK)
            engine = Engine(scheduler, session, clock)

            def until(seconds: float) -> None:
                clock.now = max(clock.now, began + round(seconds * 1e9))

            yield engine, until
            engine.end()
        said = json.loads((session / "metadata.json").read_text())
        ended = STARTED + timedelta(seconds=said["duration_sec"])
        said |= {"host": name, "started_at": STARTED.isoformat(), "ended_at": ended.isoformat()}
        said |= facts
        (session / "metadata.json").write_text(json.dumps(said))

    @contextmanager
    def _key(self, secret: str | None) -> Iterator[None]:
        """The user has given the contents a key, or has not."""
        if secret is None:
            yield
            return
        file = self.folder.parent / f"key of {secret}"
        file.write_text(secret * 16)
        file.chmod(0o600)
        with mock.patch.dict(os.environ, {"VLLM_PROFILING_CONTENT_KEY": str(file)}):
            yield
