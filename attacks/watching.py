# SPDX-License-Identifier: Apache-2.0
"""Have every scheduler of this process recorded."""

from __future__ import annotations

import os


def watch_schedulers() -> None:
    """From now on a scheduler that is made is watched; importing vLLM for it takes a while."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import vllm.v1.core.sched.scheduler as module

    from profilemate.hooks.kv import scheduler

    scheduler.attach(module)
