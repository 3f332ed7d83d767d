# SPDX-License-Identifier: Apache-2.0
"""How long the full summary of 10 million evictions takes: python -m benchmarks.analyzer

Makes a session with so many evictions and about as many rows of allocations (once: it is kept), and
runs the whole of `python -m analysis --full` on it. A bare Polars scan of all its tables, a mean of
each column of numbers and the lengths of the lists, takes turns with it; the ratios of the two, by
the clock and by processor time, and the summary's peak of memory count. Then the report is made
once.

With --packed, the summary of the same session in packed segments takes turns with that of the plain
files instead.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks import environment, large_session, packed_session
from benchmarks.command import Options, count, progress, run
from benchmarks.processes import Usage, measured
from benchmarks.result import Result, Target, middle

TIME = Target(3.0)
MEMORY = Target(1.0)
REPORT = Target(60.0)

SCAN = """
import sys, polars as pl
from pathlib import Path
for table in Path(sys.argv[1]).glob("*.csv"):
    rows = pl.scan_csv(table)
    numbers = [name for name, kind in rows.collect_schema().items() if kind.is_numeric()]
    print(rows.select(pl.col(numbers).mean()).collect(engine="streaming").width)
lists = pl.col("hash_ids", "output_hash_ids", "prefix_ids").list.len().sum()
requests = pl.scan_ndjson(Path(sys.argv[1], "requests.jsonl"))
print(requests.select(pl.col("input_length").mean(), lists).collect(engine="streaming").width)
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--evictions", type=count, default=10_000_000, help="(10 million)")
    parser.add_argument("--repeats", type=count, default=3, help="of both, in turn (3)")
    parser.add_argument("--packed", action="store_true", help="compare packed with plain files")


def measure(options: Options) -> list[Result]:
    """Ratios to the scan, gigabytes, and the report's seconds."""
    session = made(options.evictions)
    if options.packed:
        return [_packed(session, options.repeats)]
    scan(session)  # The files are in the system's cache from now on.
    pairs = []
    for number in range(options.repeats):
        bare, summary = scan(session), summarize(session)
        progress(f"{number + 1} of {options.repeats}: summary {shown(summary)}, scan {shown(bare)}")
        pairs.append((bare, summary))
    page = report(session)
    progress(f"report {shown(page)}")
    bare, summary = pairs[len(pairs) // 2]
    size = sum(path.stat().st_size for path in session.iterdir()) / 1e6
    note = f"{size:,.0f} MB; summary {shown(summary)}, scan {shown(bare)}"
    wall = [full.wall_sec / bare.wall_sec for bare, full in pairs]
    cpu = [full.cpu_sec / bare.cpu_sec for bare, full in pairs]
    peaks = [full.peak_bytes / 1e9 for _, full in pairs]
    return [
        middle("analyzer: time", wall, "× a bare scan", TIME, note),
        middle("analyzer: processor time", cpu, "× a bare scan", TIME, ""),
        middle("analyzer: memory", peaks, "GB", MEMORY, ""),
        middle("analyzer: report", [page.wall_sec], "s", REPORT, shown(page)),
    ]


def _packed(session: Path, repeats: int) -> Result:
    folder = session.with_name(f"{session.name}_packed")
    if not folder.exists():
        progress(f"packing it (kept in {session.parent.name})")
        with tempfile.TemporaryDirectory(dir=session.parent, prefix="packing-") as scratch:
            packed_session.write(session, Path(scratch, folder.name), large_session.SECONDS)
            shutil.move(Path(scratch, folder.name), folder)
    summarize(session)  # The files are in the system's cache from now on.
    ratios = []
    for number in range(repeats):
        plain, packed = summarize(session), summarize(folder)
        progress(f"{number + 1} of {repeats}: plain {shown(plain)}, packed {shown(packed)}")
        ratios.append(packed.cpu_sec / plain.cpu_sec)
    return middle(
        "analyzer: packed segments", ratios, "× the processor time of plain files", None, ""
    )


def scan(session: Path) -> Usage:
    """The tables' means, with Polars alone."""
    return _measured("-c", SCAN, str(session))


def summarize(session: Path) -> Usage:
    """The whole summary, without the replay of its advice."""
    return _measured("-m", "analysis", "--full", str(session), "--no-replay")


def report(session: Path) -> Usage:
    """The page."""
    with tempfile.TemporaryDirectory(dir=session.parent, prefix="report-") as scratch:
        target = str(Path(scratch, "report.html"))
        return _measured("-m", "profilemate", "report", str(session), "--no-replay", "-o", target)


def _measured(*arguments: str) -> Usage:
    environ = environment.variables(environment.cache())
    return measured([sys.executable, *arguments], environ, environment.ROOT)


def shown(usage: Usage) -> str:
    return (
        f"{usage.wall_sec:.1f} s ({usage.cpu_sec:.1f} s of processors, "
        f"{usage.peak_bytes / 1e9:.2f} GB)"
    )


def made(evictions: int) -> Path:
    """The session with so many evictions in an hour, made if it is not there yet."""
    session = environment.cache() / f"session_{evictions}_of_everything"
    if not session.exists():
        progress(f"making {evictions:,} evictions (kept in {session.parent.name})")
        with tempfile.TemporaryDirectory(dir=session.parent, prefix="making-") as scratch:
            folder = Path(scratch, session.name)
            large_session.write(folder, evictions)
            shutil.move(folder, session)
    return session


if __name__ == "__main__":
    run(__doc__, add_options, measure)
