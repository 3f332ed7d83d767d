# SPDX-License-Identifier: Apache-2.0
"""How long a fleet takes: python -m benchmarks.fleet

Makes 1,000 sessions of some 100,000 rows each (once: they are kept). Ten of them have tables of
their own, and the others links to these, but metadata.json and totals.json of their own. Then
`profilemate fleet` reads them in two processes, and a tenth of them, to see whether memory grows.

With --ray, a local Ray cluster of two nodes with a processor each takes turns with two processes
here; starting the cluster is not measured, and connecting to it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import environment, large_session
from benchmarks.command import Options, count, progress, run
from benchmarks.processes import Usage, measured
from benchmarks.result import Result, Target, middle
from tests.fleet.made import engine, histogram, write_totals

TIME = Target(180.0)
MEMORY = Target(1.0)
GROWTH = Target(1.1)
OVERHEAD = Target(1.2)

EVICTIONS = 49_000
"""Of a session; it has twice as many rows, and a few, in all tables together."""
APART = 10
_STAYS_HERE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
JOBS = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=count, default=1_000, help="(1,000)")
    parser.add_argument("--repeats", type=count, default=1, help="of each (1)")
    parser.add_argument("--ray", action="store_true", help="compare with a Ray cluster")


def measure(options: Options) -> list[Result]:
    """Seconds, and gigabytes of all processes together."""
    folder = made(options.sessions)
    few = str(folder / "part_0")
    if options.ray:
        return _ray(str(folder), options.repeats)
    alone = [read(few) for _ in range(options.repeats)]
    progress(f"a tenth: {shown(alone[-1])}")
    whole = [read(str(folder)) for _ in range(options.repeats)]
    progress(f"all: {shown(whole[-1])}")
    seconds = [used.wall_sec for used in whole]
    # No more than this: the largest process stands for each of them.
    peaks = [used.peak_bytes * (JOBS + 1) / 1e9 for used in whole]
    growth = [big.peak_bytes / small.peak_bytes for big, small in zip(whole, alone, strict=True)]
    return [
        middle(f"fleet: {options.sessions:,} sessions", seconds, "s", TIME, shown(whole[-1])),
        middle("fleet: memory of all processes", peaks, "GB", MEMORY, "at most"),
        middle("fleet: memory of the largest", growth, "× that of a tenth", GROWTH, ""),
    ]


def _ray(folder: str, repeats: int) -> list[Result]:
    # Nobody else can reach it then: Ray reads this when it is imported, here and in its processes.
    os.environ[_STAYS_HERE] = "0"
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        ratios, used = [], []
        for number in range(repeats):
            local, ray = read(folder), read(folder, "--ray", cluster.address)
            progress(f"{number + 1} of {repeats}: local {shown(local)}, Ray {shown(ray)}")
            ratios.append(ray.wall_sec / local.wall_sec)
            used.append(ray)
    finally:
        cluster.shutdown()
    return [middle("fleet: Ray", ratios, "× local processes", OVERHEAD, shown(used[-1]))]


def read(folder: str, *options: str) -> Usage:
    """Read all sessions in this folder."""
    command = [sys.executable, "-m", "profilemate", "fleet", folder, *options]
    if not options:
        command += ["--jobs", str(JOBS)]
    environ = environment.variables(environment.cache())
    return measured(command, {**environ, _STAYS_HERE: "0"}, environment.ROOT)


def shown(usage: Usage) -> str:
    return (
        f"{usage.wall_sec:.1f} s ({usage.cpu_sec:.1f} s of processors, "
        f"{usage.peak_bytes / 1e9:.2f} GB in the largest process)"
    )


def made(sessions: int) -> Path:
    """A folder of so many sessions in ten folders, made if it is not there yet."""
    folder = environment.cache() / f"fleet_of_{sessions}"
    if not folder.exists():
        progress(f"making {sessions:,} sessions (kept in {folder.parent.name})")
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as scratch:
            for number in range(sessions):
                _write(Path(scratch, folder.name), number)
            shutil.move(Path(scratch, folder.name), folder)
    return folder


def _write(folder: Path, number: int) -> None:
    session = folder / f"part_{number % APART}" / f"session_{number:05}"
    if number < APART:
        large_session.write(session, EVICTIONS + 500 * number)
    else:
        first = folder / session.parent.name / f"session_{number % APART:05}"
        session.mkdir(parents=True)
        for file in first.iterdir():
            if file.suffix != ".json":
                os.link(file, session / file.name)
        shutil.copy(first / "metadata.json", session)
    known = json.loads((session / "metadata.json").read_text())
    known |= {"session_id": session.name, "host": f"host-{number % 250}"}
    (session / "metadata.json").write_text(json.dumps(known))
    write_totals(session, [_engine(number)], int(large_session.SECONDS * 1e9))


def _engine(number: int) -> dict[str, Any]:
    requests = EVICTIONS // large_session.BLOCKS
    prompt = large_session.PROMPT * large_session.BLOCK + 2
    found = requests // 2 * large_session.SHARED * large_session.BLOCK
    spans = histogram([(1 + number % 7) * 10**8] * requests)
    made_up: dict[str, Any] = engine(
        prefix_cache={
            "requests": requests,
            "requests_hit": requests // 2,
            "query_tokens": requests * prompt,
            "hit_tokens": found,
        },
        requests={
            "finished": {"stop": requests},
            "prompt_tokens": requests * prompt,
            "output_tokens": requests * 640,
            "queue": spans,
            "first_token": spans,
            "duration": spans,
        },
    )
    return made_up


if __name__ == "__main__":
    run(__doc__, add_options, measure)
