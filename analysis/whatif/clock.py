# SPDX-License-Identifier: Apache-2.0
"""What moves the simulated clock of a replay on?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Number = Any
"""A number, or an array of them."""

DEFAULT_SEC = 0.03
"""Of each step of a trace, which tells of none, unless the user says otherwise."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: ``constant_sec`` and so much for each prefill token, decode token and
    request in it.

    ``steps``: how many it was fitted to, of ``mean_sec`` on average; ``rms_error_sec``: the root
    of its mean squared error. All three are None where it was not fitted.
    """

    constant_sec: float
    prefill_token_sec: float = 0.0
    decode_token_sec: float = 0.0
    request_sec: float = 0.0
    steps: int | None = None
    mean_sec: float | None = None
    rms_error_sec: float | None = None

    def seconds(self, prefill_tokens: Number, decode_tokens: Number, requests: Number) -> Number:
        """The time of a step with these, or of each of many."""
        return (
            self.constant_sec
            + self.prefill_token_sec * prefill_tokens
            + self.decode_token_sec * decode_tokens
            + self.request_sec * requests
        )
