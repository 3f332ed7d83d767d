# SPDX-License-Identifier: Apache-2.0
"""A process of its own that runs some requests through vLLM's scheduler, and records them.

python -m tests.kv.one_process MODEL SESSIONS CONTENT_KEY SEED
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.kv.recording import hooks_only
from tests.support.scheduler import RequestMaker, build_scheduler, drive, tokens


def main(model: str, sessions: str, content_key: str, seed: str) -> None:
    """Two prompts that begin alike; the first one's answer fills a block."""
    import vllm.v1.core.sched.scheduler as module

    from profilemate.hooks.kv import scheduler

    scheduler.attach(module)
    with hooks_only(Path(sessions)):
        os.environ["VLLM_PROFILING_CONTENT_KEY"] = content_key
        make = RequestMaker()
        scheduler_ = build_scheduler(Path(model), 60)
        first = tokens(int(seed), 40)
        drive(scheduler_, [(0.0, make("first", first, 30)), (0.0, make("second", first[:33], 2))])


if __name__ == "__main__":
    main(*sys.argv[1:])
