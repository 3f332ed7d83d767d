# SPDX-License-Identifier: Apache-2.0
"""Record what schedulers do, without a collector beside them, and make the tables afterwards."""

from __future__ import annotations

import csv
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from profilemate import messages
from profilemate.collector.follower import Follower
from profilemate.record import launch, recorder
from profilemate.record.writer import Writer
from tests.support.oracle import Oracle

Row = dict[str, Any]

CSV_TABLES = (
    "kv_cache_usage.csv",
    "kv_cache_allocations.csv",
    "kv_cache_evictions.csv",
    "prefix_cache_lookups.csv",
    "scheduler_steps.csv",
)
_TEXT = frozenset(
    ("event", "request_id", "reason", "origin", "owner_request", "evicting_request", "kind")
)
TABLES = (*CSV_TABLES, "requests.jsonl")

PATIENCE_SEC = 120


class Clock:
    """Stands in for ``time.monotonic_ns``: it stands still until it is moved.

    What the hooks and the oracle see of one call then has the same time, so that times can be
    compared to the last digit of the tables.
    """

    def __init__(self) -> None:
        self.now = 1_000_000_000_000

    def __call__(self) -> int:
        return self.now

    def tick(self, microseconds: int = 1_000) -> None:
        """Let time pass."""
        self.now += microseconds * 1_000


class NoThread(Writer):
    """Where the limit of threads is reached."""

    def _start(self) -> bool:
        return False


@contextmanager
def hooks_only(
    sessions: Path,
    clock: Clock | None = None,
    *,
    name: str = "",
    collector: bool = False,
    thread: bool = True,
) -> Iterator[None]:
    """Schedulers made inside record into a session under ``sessions``, to its end.

    It is a new one where no ``name`` is given. Without a ``collector`` the journals stay, and a
    test makes the tables when it wants them. Without a ``thread`` each step is written as it ends,
    as where no thread can be had.
    """
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("VLLM_PROFILING")]:
            patch.delenv(variable)
        patch.setenv("VLLM_PROFILING_DIR", str(sessions))
        # Set, so that what is left for child processes is taken away again.
        patch.setenv("VLLM_PROFILING_SESSION", name)
        patch.setenv("VLLM_PROFILING_FAILED", "")
        # What another test has heard is said again.
        patch.setattr(messages, "_said", {})
        if not collector:
            patch.setattr(launch, "start", lambda directory: None)
        if not thread:
            patch.setattr(recorder, "_writer", NoThread())
        if clock is not None:
            patch.setattr(time, "monotonic_ns", clock)
        try:
            yield
        finally:
            recorder.close_all()


def wait_until_written() -> None:
    """Wait for the thread to have written all steps that ended, which it does by itself."""
    give_up = time.monotonic() + PATIENCE_SEC
    while any(known.waiting for known in recorder._living()):
        assert time.monotonic() < give_up
        time.sleep(0.001)


@contextmanager
def recorded(
    sessions: Path, clock: Clock | None = None, *, walk_every: int = 1
) -> Iterator[Oracle]:
    """As ``hooks_only``, with an oracle beside the hooks; one scheduler may be made."""
    with Oracle(walk_every).watching() as oracle, hooks_only(sessions, clock):
        yield oracle


def found(sessions: Path, clock: Clock) -> str:
    """Found a session before its first process does; returns its name.

    Two sessions founded like this have the same origin and secret, and so the same tables of
    the same story.
    """
    name = "session_20260101_000000_founded"
    journals = sessions / name / "journal"
    journals.mkdir(mode=0o700, parents=True)
    founding = {
        "session_id": name,
        "host": platform.node(),
        "origin_ns": clock.now,
        "started_at": 1_767_225_600.0,
        "key": "11" * 32,
        "argv": ["vllm", "serve"],
    }
    (journals / "session.json").write_text(json.dumps(founding))
    return name


def only_session(sessions: Path) -> Path:
    """The one session that lies in this folder."""
    (folder,) = sessions.glob("session_*")
    return folder


@dataclass(frozen=True)
class Tables:
    """A session's tables, as Python's own csv and json modules read them."""

    folder: Path

    def rows(self, table: str) -> list[Row]:
        """The rows of a CSV table: text, numbers, and None for an empty cell among numbers."""
        path = self.folder / table
        if not path.exists():
            return []
        with path.open(newline="") as file:
            return [
                {name: cell if name in _TEXT else _number(cell) for name, cell in row.items()}
                for row in csv.DictReader(file)
            ]

    def requests(self) -> dict[str, Row]:
        """The rows of requests.jsonl by request id."""
        path = self.folder / "requests.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        by_id = {row["request_id"]: row for row in rows}
        assert len(by_id) == len(rows)
        return by_id

    @property
    def metadata(self) -> dict[str, Any]:
        """metadata.json."""
        content: dict[str, Any] = json.loads((self.folder / "metadata.json").read_bytes())
        return content

    def bytes_of(self) -> dict[str, bytes]:
        """The tables that there are, byte for byte."""
        paths = [self.folder / table for table in TABLES]
        return {path.name: path.read_bytes() for path in paths if path.exists()}


def _number(cell: str) -> float | int | None:
    if not cell:
        return None
    return float(cell) if "." in cell else int(cell)


def make_tables(session: Path, target: Path) -> Tables:
    """The tables of a session whose processes have ended; its journals stay as they are."""
    target.mkdir()
    follower = Follower(session, target)
    follower.discover()
    while follower.read():
        follower.apply()
    follower.close()
    return Tables(target)


def journal_of(session: Path) -> Path:
    """The one journal of a session."""
    (path,) = (session / "journal").glob("*.journal")
    return path


def copy_of(session: Path, target: Path, journal: bytes) -> Path:
    """A session with the same founding, whose one journal holds these bytes."""
    shutil.copytree(session, target)
    journal_of(target).write_bytes(journal)
    return target
