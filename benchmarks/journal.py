# SPDX-License-Identifier: Apache-2.0
"""What a block event takes in the journal: python -m benchmarks.journal

Records vLLM's real scheduler under the trace in tests/data (3,000 requests) with a pool of 1,000
blocks, and divides the size of the journal by the blocks that were allocated, reused, freed or
cached. Everything else in the journal (steps, requests, content ids) is spread over these. It is
recorded several times: how long steps took is part of what is written.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks import recordings
from benchmarks.command import Options, count, run
from benchmarks.result import Result, Target, middle

TARGET = Target(6.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=count, default=3, help="recordings (3)")


def measure(options: Options) -> list[Result]:
    """Bytes a block event."""
    figures = []
    for number in range(options.repeats):
        (recording,) = recordings.recorded([1], number)
        size = recordings.journal_bytes(recording)
        with tempfile.TemporaryDirectory() as scratch:
            session = Path(scratch, "session")
            recordings.complete(recording, session)
            events = recordings.block_events(session)
        figures.append(size / events)
    note = f"{size:,} bytes for {events:,} block events"
    return [middle("journal", figures, "bytes/block event", TARGET, note)]


if __name__ == "__main__":
    run(__doc__, add_options, measure)
