# SPDX-License-Identifier: Apache-2.0
"""A logits processor of the user's: requests that ask for it are slow, for as long as a file is
there.

Tests kill and look while an answer is under way. How soon they get a processor does not matter
then: the model is so small that a busy machine could be at the answer's end.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

STEP_SECONDS = 0.1
"""What each token of a slow request takes."""


class Slow(AdapterLogitsProcessor):
    """Requests whose ``extra_args`` (``vllm_xargs`` over HTTP) have ``slow_while``, a file."""

    def is_argmax_invariant(self) -> bool:
        # If it were, vLLM would not call it for greedy sampling.
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        if not (params.extra_args and "slow_while" in params.extra_args):
            return None
        file = Path(params.extra_args["slow_while"])

        def wait(_output: list[int], logits: Any) -> Any:
            if file.exists():
                time.sleep(STEP_SECONDS)
            return logits

        return wait
