# SPDX-License-Identifier: Apache-2.0
"""What recording adds to one model execution with a CUDA graph replay.

python -m benchmarks.graph_replay
"""

from __future__ import annotations

import argparse

from benchmarks.command import Options, run
from benchmarks.result import Result, Target, unmeasured

TARGET = Target(2.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """None yet."""


def measure(_options: Options) -> list[Result]:
    """Nothing: no hook watches a replay yet, so there is nothing that could cost."""
    why = "not there yet: CUDA graph hooks are another issue"
    return [unmeasured("CUDA graph replay", why, TARGET, "µs")]


if __name__ == "__main__":
    run(__doc__, add_options, measure)
