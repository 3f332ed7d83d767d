# SPDX-License-Identifier: Apache-2.0
"""What did a workload do in vLLM's own scheduler, configuration by configuration?"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.whatif.clock import StepTime
from analysis.whatif.outcome import Outcome


@dataclass(frozen=True)
class Failure:
    """A configuration that could not be simulated, and why."""

    label: str
    reason: str


@dataclass(frozen=True)
class Simulated:
    """``name``: the workload, of so many ``requests`` on so many ``engines``; ``warm_up`` of the
    requests are simulated and not counted.

    ``left_out``: requests that one configuration served and another one did not. They are in no
    hit rate but that of ``Outcome.served``, so that all others are of the same requests.

    ``vllm``: the release whose code simulated it. ``recorded_vllm``: the release that it was
    recorded with. Both are None where not known. ``step_time``: how long a step takes on the
    simulated clock. ``notes``: what the simulation does otherwise than the engine, a line each.

    ``measured``: what the session itself did, None for a trace. ``baseline``: the recorded
    configuration, simulated; None for a trace, and where that failed. ``outcomes``: the other
    configurations, in order. ``failures``: those that could not be simulated.
    """

    name: str
    requests: int
    warm_up: int
    left_out: int
    engines: int
    vllm: str | None
    recorded_vllm: str | None
    step_time: StepTime
    notes: tuple[str, ...]
    measured: Outcome | None
    baseline: Outcome | None
    outcomes: tuple[Outcome, ...]
    failures: tuple[Failure, ...]
