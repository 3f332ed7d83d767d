# SPDX-License-Identifier: Apache-2.0
"""Simulate a session in this process, as ``profilemate whatif`` does in others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from analysis.tables.session import open_session
from analysis.whatif import arrivals, prefixes, step_time
from analysis.whatif.clock import DEFAULT_SEC, StepTime
from analysis.whatif.configuration import Choices, Configuration, configurations, pools, recorded
from analysis.whatif.outcome import Outcome
from analysis.whatif.workload import Workload, of_session
from profilemate.simulation.engine import Engine


class Recorded:
    """A session, ready to be simulated with other settings; ``batches`` are in flight at once,
    unless it is what the session says."""

    def __init__(self, session: Path, after_sec: float = 0.0, batches: int | None = None) -> None:
        opened = open_session(session, after_sec=after_sec)
        found = of_session(opened)
        self.base, self.notes = recorded(found, Choices())
        self.base = replace(self.base, batches=batches or self.base.batches)
        fitted = step_time.fit(opened, batches=self.base.batches)
        self.step_time = fitted or StepTime(DEFAULT_SEC)
        self.workload: Workload = arrivals.estimated(opened, found, self.step_time)
        self.begin_sec = opened.begin_sec
        self.prefixes = prefixes.read(opened)

    @property
    def measured(self) -> Outcome:
        assert self.workload.measured is not None
        assert self.workload.measured.outcome is not None
        return self.workload.measured.outcome

    def configuration(self, blocks: int | None = None, **settings: float | bool) -> Configuration:
        """The recorded one with these settings; ``blocks`` as vLLM counts them."""
        choices = Choices(
            blocks=pools(str(blocks)) if blocks else (),
            **{name: (value,) for name, value in settings.items()},  # type: ignore[arg-type]
        )
        return (
            *configurations(self.base, choices, has_contents=self.workload.has_contents),
            self.base,
        )[0]

    def simulate(self, model: Path, blocks: int | None = None, **settings: float | bool) -> Outcome:
        """What vLLM's scheduler does with the session's requests and these settings."""
        configuration = self.configuration(blocks, **settings)
        engine = Engine(
            model,
            configuration,
            self.workload,
            self.step_time,
            prefixes=self.prefixes and self.prefixes.of_engine(0),
            begin_sec=self.begin_sec,
        )
        return engine.run().outcome(configuration)
