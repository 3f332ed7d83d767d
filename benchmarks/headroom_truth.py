# SPDX-License-Identifier: Apache-2.0
"""How true is the head room of a session? python -m benchmarks.headroom_truth

Records vLLM's scheduler with a load in a pool with room for all of it, estimates preemptions and
waiting on smaller pools and with fewer places, and then drives the scheduler there. Prints the
table of docs/head-room.md.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

ROOMY = 8_001
PLACES = 256
SETTINGS = {
    "USUAL": (
        (801, PLACES),
        (701, PLACES),
        (601, PLACES),
        (501, PLACES),
        (501, 20),
        (401, 20),
        (401, 16),
        (301, 16),
    ),
    "LONG_PROMPTS": (
        (1_201, PLACES),
        (1_001, PLACES),
        (801, PLACES),
        (801, 16),
        (601, 16),
        (501, 12),
    ),
    "LONG_ANSWERS": (
        (701, PLACES),
        (601, PLACES),
        (501, PLACES),
        (501, 24),
        (401, 24),
        (301, 16),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("loads", nargs="*", choices=[*SETTINGS, "all"], default="all")
    options = parser.parse_args()
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
    # As a vLLM process with the repository on its path does it.
    module = import_module("vllm.v1.core.sched.scheduler")
    import_module("profilemate.hooks.kv.scheduler").attach(module)
    print("| load | pool | max_num_seqs | preemptions: true, estimated | wait: true, estimated |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as scratch:
        for name in SETTINGS if "all" in options.loads else options.loads:
            for line in _rows(name, Path(scratch) / name):
                print(line, flush=True)


def _rows(name: str, scratch: Path) -> Iterator[str]:
    from analysis import open_session
    from analysis.headroom import head_room
    from tests.headroom import loads
    from tests.headroom.test_truth import read, waited
    from tests.support.scheduler import write_model

    load, model = getattr(loads, name), write_model(scratch / "model")
    roomy = load.run(model, scratch / "roomy", ROOMY, PLACES)
    drawn, demand = read(open_session(roomy.session))
    for blocks, places in SETTINGS[name]:
        truth = load.run(model, scratch / f"{blocks}-{places}", blocks, places)
        found = head_room.setting(drawn, demand, blocks - 1, places)
        cells = (
            name.lower().replace("_", " "),
            f"{blocks - 1:,}",
            f"{places:,}",
            f"{truth.preemptions:,}, {found.preemptions:,.0f}",
            f"{100 * waited(truth):.0f} %, {100 * found.waiting_share:.0f} %",
        )
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
