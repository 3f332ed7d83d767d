# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ``vllm bench throughput``: it leaves a session of known figures, and a log.

    python fake_vllm.py [--max-num-seqs N] [--block-size N] [--ends HOW] ...

Tokens a second are 100 times ``max-num-seqs``, and 10 more for each run before with the same. A
session has 4 requests of 30 prompt tokens and 10 generated ones, which hold 3 blocks of 16.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.analysis.builder import METADATA, SessionBuilder


def leave_session(block_size: int) -> None:
    session = SessionBuilder(Path(os.environ["VLLM_PROFILING_DIR"]) / "session_20260131_120000_7_a")
    cache = {**METADATA["cache"], "block_size": [block_size], "tokens": 100 * block_size}
    groups = [{"kind": "FullAttentionSpec", "block_size": block_size}]
    session.metadata(cache=cache, groups=groups, device="cpu")
    blocks = -(-39 // block_size)
    session.requests(
        *(
            {
                "timestamp": 1000 * number,
                "input_length": 30,
                "output_length": 10,
                "request_id": f"r{number}",
                "block_size": block_size,
                "num_blocks": blocks,
                "computed_tokens": 39,
                "preemptions": 0,
                "queue_sec": 0.0,
                "first_token_sec": number + 0.5,
                "finish_sec": number + 2.0,
                "finish_reason": "length",
                "hit_tokens": 0,
            }
            for number in range(4)
        )
    )
    session.lookups(
        *({"request_id": f"r{n}", "query_tokens": 30, "hit_tokens": 6} for n in range(4))
    )
    session.rows(
        "scheduler_steps.csv",
        {"step": 1, "preempted_reqs": 2, "scheduled_tokens": 30, "schedule_us": 1},
    )


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--max-num-seqs", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--ends", default="well")
    args, _ = parser.parse_known_args()
    print("run with", " ".join(sys.argv[1:]), flush=True)
    if args.ends == "badly":
        print("ValueError: --max-num-seqs is more than there is room for")
        sys.exit(3)
    if args.ends == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if args.ends in ("late", "later"):
        # With a process beside it, as an engine is.
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "beside"])
        time.sleep(600)
    if args.ends == "leaving":
        subprocess.Popen(
            [sys.executable, "-c", "import signal, time; time.sleep(600)", "left behind"]
        )
    if args.ends != "unrecorded":
        leave_session(args.block_size)
    if args.ends != "silent":
        # The folder's name has the repeat: 001-2_...
        repeat = int(Path(os.environ["VLLM_PROFILING_DIR"]).parent.name[4])
        speed = 100 * args.max_num_seqs + 10 * (repeat - 1)
        print(
            f"Throughput: 1.00 requests/s, {4 * speed:.2f} total tokens/s, "
            f"{speed:.2f} output tokens/s"
        )


if __name__ == "__main__":
    main()
