# SPDX-License-Identifier: Apache-2.0
"""What does a rule hand on: advice whose number is still to be tried?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from analysis.summary import Advice, Confidence
from analysis.whatif.outcome import Outcome

Setting = Literal["num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"]
"""A field of ``analysis.whatif.configuration.Configuration``."""

NEARLY = 0.9
"""Advice promises nine in ten of the tokens that would be found."""
MUCH_SHORTER = 0.5
"""A queue is shorter if requests wait half as long, on average."""


@dataclass(frozen=True)
class Aim:
    """What a replay has to show.

    ``figure``: ``preemptions`` (none are left), ``hit_rate`` (at least nine in ten of ``tokens``
    more are found) or ``queue_mean_sec`` (it is half as long or shorter, without one more
    preemption). ``measured``: the session's own figure, None where it is not known; in tokens
    found, for the hit rate.
    """

    figure: Literal["preemptions", "hit_rate", "queue_mean_sec"]
    measured: float | None
    tokens: int = 0

    def met(self, before: Outcome, after: Outcome) -> bool:
        """Whether the second outcome shows it, compared with the first one."""
        if self.figure == "preemptions":
            return after.preemptions == 0
        if self.figure == "hit_rate":
            return after.hit_tokens - before.hit_tokens >= NEARLY * self.tokens
        shorter = (after.queue_mean_sec or 0.0) <= MUCH_SHORTER * (before.queue_mean_sec or 0.0)
        return shorter and (after.preemptions or 0) <= (before.preemptions or 0)


@dataclass(frozen=True)
class Candidate:
    """Advice that names a number, before anyone has tried it.

    ``setting`` gets the ``value``. ``aims``: all of them have to be met. ``others``: the values to
    try if the first one does not do, those that change less first; None for all larger ones, in
    steps of ``grain``. ``write``: the advice with another value, or without one. ``sure``: its
    confidence once the value is confirmed. ``without``: whether the advice makes sense where no
    value is.
    """

    setting: Setting
    value: int
    aims: tuple[Aim, ...]
    write: Callable[[int | None], Advice]
    sure: Confidence
    others: Sequence[int] | None = None
    grain: int = 1
    without: bool = False

    @property
    def advice(self) -> Advice:
        """The advice with the first value."""
        return self.write(self.value)
