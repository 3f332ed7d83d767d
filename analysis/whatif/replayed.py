# SPDX-License-Identifier: Apache-2.0
"""What came of a workload's replay through vLLM's own scheduler, configuration by configuration?"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.whatif.clock import StepTime
from analysis.whatif.outcome import Outcome


@dataclass(frozen=True)
class Failure:
    """A configuration that could not be replayed, and why."""

    label: str
    reason: str


@dataclass(frozen=True)
class Replayed:
    """``name``: the workload, of so many ``requests`` on so many ``engines``.

    ``vllm``: the release whose code replayed it, and ``recorded_vllm`` the one that it was
    recorded with, None where that is not known. ``step_time``: how long a step takes on the
    simulated clock. ``notes``: what the replay does otherwise than the engine did, a line each.

    ``measured``: what the session tells, None of a trace. ``baseline``: the recorded
    configuration, replayed; None of a trace, and where that failed. ``outcomes``: the others, in
    order, and ``failures`` those of them that came to nothing.
    """

    name: str
    requests: int
    engines: int
    vllm: str | None
    recorded_vllm: str | None
    step_time: StepTime
    notes: tuple[str, ...]
    measured: Outcome | None
    baseline: Outcome | None
    outcomes: tuple[Outcome, ...]
    failures: tuple[Failure, ...]
