# SPDX-License-Identifier: Apache-2.0
"""The sessions that a benchmark leaves: their metadata, and waiting for them to be complete."""

from __future__ import annotations

import csv
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.result import BenchmarkError

SETTLED_SEC = 120
"""How long the collector may take for what is left."""


def only(base: Path) -> Path:
    """The one session in this folder.

    Raises:
        BenchmarkError: there is none, or more than one.

    """
    found = list(base.glob("session_*"))
    if len(found) != 1:
        raise BenchmarkError(f"expected one session, found {len(found)}: was anything recorded?")
    return found[0]


def metadata(session: Path) -> dict[str, Any]:
    """metadata.json; empty where it is not there yet."""
    try:
        known: dict[str, Any] = json.loads((session / "metadata.json").read_text())
    except FileNotFoundError:
        return {}
    return known


def wait_until_complete(session: Path) -> dict[str, Any]:
    """Wait for the collector to end; returns the metadata.

    Raises:
        BenchmarkError: it takes too long.

    """
    deadline = time.monotonic() + SETTLED_SEC
    while not (known := metadata(session)).get("complete"):
        if time.monotonic() > deadline:
            raise BenchmarkError(f"the session is not complete after {SETTLED_SEC} s")
        time.sleep(0.05)
    return known


def rows(session: Path, table: str) -> Iterator[dict[str, str]]:
    """The rows of a CSV table, those of its closed segments first."""
    for path in sorted(session.glob(f"segments/*/{table}.*.csv.gz")):
        with gzip.open(path, "rt", newline="") as packed:
            yield from csv.DictReader(packed)
    with open(session / f"{table}.csv", newline="") as file:
        yield from csv.DictReader(file)


def check_steps(session: Path, steps: int) -> None:
    """Raises BenchmarkError unless exactly so many steps are in the session's table."""
    recorded = sum(int(row["repeats"]) for row in rows(session, "scheduler_steps"))
    if recorded != steps:
        raise BenchmarkError(f"{recorded} of {steps} steps were recorded")
