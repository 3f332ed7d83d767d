# SPDX-License-Identifier: Apache-2.0
"""Replicas of a deployment: real schedulers, a session each, on one wall clock."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kv.recording import Clock, hooks_only
from tests.situations.bench import BLOCK, Engine
from tests.support.scheduler import build_scheduler

STARTED = 1_767_225_600.0
"""When all of them start: 2026-01-01 00:00:00 UTC."""
KEY = "00112233aabbccdd"
"""Stands in for the name of a key that sessions share."""


class Deployment:
    """Makes replicas, one after the other; each has the same seconds to itself."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self._model = model

    @contextmanager
    def replica(
        self, name: str, usable_blocks: int, *, contents_key: str | None = KEY, **facts: Any
    ) -> Iterator[tuple[Engine, Callable[[float], None]]]:
        """A replica on the host of this name. Its session is complete when the block has ended.

        Gives the engine, and a function that waits until so many seconds have passed.
        """
        clock = Clock()
        began = clock.now
        session = self._founded(name, clock)
        with hooks_only(self.folder, clock, name=session.name):
            scheduler = build_scheduler(self._model, usable_blocks + 1, block_size=BLOCK)
            engine = Engine(scheduler, session, clock)

            def until(seconds: float) -> None:
                clock.now = max(clock.now, began + round(seconds * 1e9))

            yield engine, until
            engine.end()
        said = json.loads((session / "metadata.json").read_text())
        said |= {"host": name, "contents_key": contents_key, **facts}
        (session / "metadata.json").write_text(json.dumps(said))

    def _founded(self, name: str, clock: Clock) -> Path:
        """A session with the key of all others, so that their contents have the same ids."""
        session = self.folder / f"session_{name}"
        journals = session / "journal"
        journals.mkdir(mode=0o700, parents=True)
        founding = {
            "session_id": session.name,
            "host": platform.node(),
            "origin_ns": clock.now,
            "started_at": STARTED,
            "key": "11" * 32,
            "argv": ["vllm", "serve"],
        }
        (journals / "session.json").write_text(json.dumps(founding))
        return session
