# SPDX-License-Identifier: Apache-2.0
"""How long the fast engine of whatif takes: python -m benchmarks.whatif

Makes a trace of 12,000 requests out of the tests' one (four times its 3,000, each time with
contents of its own but for the system prompt that all begin with): 310,000 full blocks. A new
interpreter reads it and models 13 pool sizes under LRU, FIFO and Belady's bound; from start to
end counts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.command import Options, count, progress, run
from benchmarks.processes import measured
from benchmarks.result import Result, Target, middle

TIME = Target(3.0)

TRACE = environment.ROOT / "tests" / "data" / "mooncake_conversation_head.jsonl.gz"
COPIES = 4
APART_MS = 900_000

PROGRAM = """
import sys
from analysis.whatif import fast
from analysis.whatif.workload import read_workload
sizes = [round(500 * 1.6**step) for step in range(13)]
found = fast.curve(read_workload(sys.argv[1]), sizes, ["lru", "fifo", "belady"])
assert len(found.points) == 13 and found.ceiling.requests == int(sys.argv[2])
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=count, default=5, help="of the whole (5)")


def measure(options: Options) -> list[Result]:
    """Seconds by the clock."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.jsonl")
        rows = list(requests())
        trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
        environ = environment.variables(environment.cache())
        command = [sys.executable, "-c", PROGRAM, str(trace), str(len(rows))]
        for number in range(options.repeats):
            used = measured(command, environ, environment.ROOT)
            progress(f"{number + 1} of {options.repeats}: {used.wall_sec:.2f} s")
            runs.append(used)
    blocks = sum(row["input_length"] // 512 for row in rows)
    cpu = sorted(used.cpu_sec for used in runs)[len(runs) // 2]
    note = f"{len(rows):,} requests, {blocks:,} blocks; {cpu:.2f} s of processors"
    return [middle("whatif: 13 sizes, 3 rules", [used.wall_sec for used in runs], "s", TIME, note)]


def requests() -> Iterator[dict[str, Any]]:
    """The trace's requests, over and over, each time with ids that were not there before."""
    with gzip.open(TRACE, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    beyond = 1 + max(number for row in rows for number in row["hash_ids"])
    for copy in range(COPIES):
        for row in rows:
            # Block 0 is the one that all begin with.
            ids = [number and number + copy * beyond for number in row["hash_ids"]]
            timestamp = row["timestamp"] + copy * APART_MS
            yield {**row, "timestamp": timestamp, "hash_ids": ids}


if __name__ == "__main__":
    run(__doc__, add_options, measure)
