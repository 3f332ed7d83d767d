# SPDX-License-Identifier: Apache-2.0
"""How long the full summary of 10 million evictions takes: python -m benchmarks.analyzer

Makes a session whose kv_cache_evictions.csv has so many rows (once: it is kept), and runs the whole
of `python -m analysis` on it. A bare Polars scan of that file for three aggregates takes turns with
it; the ratios of the two, by the clock and by processor time, and the summary's peak of memory
count.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks import environment
from benchmarks.command import Options, count, progress, run
from benchmarks.processes import Usage, measured
from benchmarks.result import Result, Target, middle
from tests.analysis.builder import COLUMNS, SessionBuilder

TABLE = "kv_cache_evictions.csv"
TIME = Target(3.0)
MEMORY = Target(1.0)

CHUNK_ROWS = 500_000
HOUR_SEC = 3_600.0
POOL_BLOCKS = 20_000

SCAN = """
import sys, polars as pl
print(pl.scan_csv(sys.argv[1]).select(
    pl.col("lifetime_sec").mean(), pl.col("idle_sec").max(), (pl.col("reuse_count") > 0).sum(),
).collect(engine="streaming"))
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--evictions", type=count, default=10_000_000, help="(10 million)")
    parser.add_argument("--repeats", type=count, default=5, help="of both, in turn (5)")


def measure(options: Options) -> list[Result]:
    """Ratios to the scan, and gigabytes."""
    session = made(options.evictions)
    table = session / TABLE
    scan(table)  # The file is in the system's cache from now on.
    pairs = []
    for number in range(options.repeats):
        bare, summary = scan(table), summarize(session)
        progress(f"{number + 1} of {options.repeats}: summary {told(summary)}, scan {told(bare)}")
        pairs.append((bare, summary))
    bare, summary = pairs[len(pairs) // 2]
    note = f"{table.stat().st_size / 1e6:,.0f} MB; summary {told(summary)}, scan {told(bare)}"
    wall = [full.wall_sec / bare.wall_sec for bare, full in pairs]
    cpu = [full.cpu_sec / bare.cpu_sec for bare, full in pairs]
    peaks = [full.peak_bytes / 1e9 for _, full in pairs]
    return [
        middle("analyzer: time", wall, "× a bare scan", TIME, note),
        middle("analyzer: processor time", cpu, "× a bare scan", TIME, ""),
        middle("analyzer: memory", peaks, "GB", MEMORY, ""),
    ]


def scan(table: Path) -> Usage:
    """Three aggregates of the table, with Polars alone."""
    return _measured("-c", SCAN, str(table))


def summarize(session: Path) -> Usage:
    """The whole summary."""
    return _measured("-m", "analysis", str(session))


def _measured(*arguments: str) -> Usage:
    environ = environment.variables(environment.cache())
    return measured([sys.executable, *arguments], environ, environment.ROOT)


def told(usage: Usage) -> str:
    return (
        f"{usage.wall_sec:.1f} s ({usage.cpu_sec:.1f} s of processors, "
        f"{usage.peak_bytes / 1e9:.2f} GB)"
    )


def made(evictions: int) -> Path:
    """The session with so many evictions in an hour, made if it is not there yet."""
    session = environment.cache() / f"session_{evictions}_evictions"
    if not session.exists():
        progress(f"making {evictions:,} evictions (kept in {session.parent.name})")
        with tempfile.TemporaryDirectory(dir=session.parent, prefix="making-") as scratch:
            folder = Path(scratch, session.name)
            write(folder, evictions)
            shutil.move(folder, session)
    return session


def write(folder: Path, evictions: int) -> None:
    """Rows that look like those of a busy engine, the same every time."""
    import numpy as np
    import polars as pl

    SessionBuilder(folder).metadata(duration_sec=HOUR_SEC)
    draw = np.random.default_rng(0)
    columns = COLUMNS[TABLE].split(",")
    with open(folder / TABLE, "wb") as file:
        file.write(f"{COLUMNS[TABLE]}\n".encode())
        for first in range(0, evictions, CHUNK_ROWS):
            rows = min(CHUNK_ROWS, evictions - first)
            lifetime = draw.exponential(20.0, rows) + 0.05
            idle = lifetime * draw.random(rows)
            request = (np.arange(first, first + rows) // 30).astype(np.int64)
            values = {
                "timestamp_sec": (np.arange(first, first + rows) + 1) * (HOUR_SEC / evictions),
                "lifetime_sec": lifetime,
                "idle_sec": idle,
                "evictable_sec": idle * draw.random(rows),
                "block_id": draw.integers(1, POOL_BLOCKS, rows),
                "reuse_count": draw.geometric(0.7, rows) - 1,
                "reason": np.where(draw.random(rows) < 0.999, "reallocated", "explicit"),
                "content_id": draw.integers(0, 2**53, rows),
                "copies_left": (draw.random(rows) < 0.05).astype(np.int64),
                "origin": np.where(draw.random(rows) < 0.7, "prompt", "output"),
                "owner_request": [f"cmpl-{number}" for number in request],
                "evicting_request": [f"cmpl-{number + 40}" for number in request],
                "engine": np.zeros(rows, np.int64),
                "pool": np.zeros(rows, np.int64),
                "group": np.zeros(rows, np.int64),
            }
            frame = pl.DataFrame({name: values[name] for name in columns})
            frame.write_csv(file, include_header=False, float_precision=6)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
