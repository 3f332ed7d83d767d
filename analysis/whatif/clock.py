# SPDX-License-Identifier: Apache-2.0
"""How far does a step move the clock of a simulation on?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Number = Any
"""A number, or an array of numbers."""

DEFAULT_SEC = 0.03
"""The time of a step for a trace, which has no steps, unless the user sets it."""


@dataclass(frozen=True)
class StepTime:
    """The time of a step: ``constant_sec``, and a time for each prefill token, each decode token
    and each request in it.

    ``steps``: how many it was fitted to. ``mean_sec``: their mean time. ``rms_error_sec``: the root
    of the mean squared error. All three are None where it was not fitted.
    """

    constant_sec: float
    prefill_token_sec: float = 0.0
    decode_token_sec: float = 0.0
    request_sec: float = 0.0
    steps: int | None = None
    mean_sec: float | None = None
    rms_error_sec: float | None = None

    def seconds(self, prefill_tokens: Number, decode_tokens: Number, requests: Number) -> Number:
        """The time of a step in seconds, or of each of many steps."""
        return (
            self.constant_sec
            + self.prefill_token_sec * prefill_tokens
            + self.decode_token_sec * decode_tokens
            + self.request_sec * requests
        )
