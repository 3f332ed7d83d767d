# SPDX-License-Identifier: Apache-2.0
"""A scheduler of the user's, ``--scheduler-cls attacks.apps.counted.CountedScheduler``, which notes
when each step ended in the file that STEPS_FILE names: eight bytes a step."""

import os
import struct
import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

STEPS_FILE = "ATTACK_STEPS_FILE"


class CountedScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's own, with a count beside it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps = os.open(os.environ[STEPS_FILE], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        result = super().update_from_output(*args, **kwargs)
        os.write(self._steps, struct.pack("d", time.monotonic()))
        return result
