# SPDX-License-Identifier: Apache-2.0
"""What would pools of other sizes find? The model of ``whatif --fast``, asked for advice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from analysis.errors import SessionError
from analysis.judgement.advice.candidate import Setting
from analysis.judgement.advice.replay import NoReplay
from analysis.summary import Known
from analysis.tables.facts import FULL_ATTENTION
from analysis.whatif import fast
from analysis.whatif.outcome import Outcome
from analysis.whatif.workload import Workload


class Modelled:
    """The model of one session's cache; ``read`` gives its requests, and is called when needed."""

    known: Known = "modelled"

    def __init__(self, read: Callable[[], Workload]) -> None:
        self._read = read

    @cached_property
    def _found(self) -> Callable[[int], Outcome]:
        try:
            return fast.of_pools(self._read())
        except SessionError as why:
            raise NoReplay(f"The cache cannot be modelled: {why}.") from None

    def recorded(self, setting: Setting, value: int) -> Outcome:
        """The model of the recorded pool."""
        try:
            measured = self._read().measured
        except SessionError as why:
            raise NoReplay(f"The cache cannot be modelled: {why}.") from None
        if measured is None or not measured.num_blocks:
            raise NoReplay("The size of the pool is not known, so no other one can be modelled.")
        kinds = {group.kind for group in measured.facts.groups if group.kind}
        if not kinds <= set(FULL_ATTENTION):
            raise NoReplay(
                "The cache of a model with other groups than full attention is not modelled."
            )
        return self._found(measured.num_blocks)

    def most(self, setting: Setting) -> int:
        """The smallest pool that finds all that can be found."""
        return fast.enough(self._read())

    def at_once(self) -> int:
        """One size after the other, each in no time."""
        return 1

    def tried(self, setting: Setting, values: Sequence[int]) -> Sequence[Outcome]:
        """What pools of so many usable blocks find."""
        return [self._found(value) for value in values]
