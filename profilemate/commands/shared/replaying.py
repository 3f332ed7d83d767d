# SPDX-License-Identifier: Apache-2.0
"""Replay a session for its advice: through vLLM's scheduler where that can be imported, and
through the model of the cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from analysis.errors import RuleError, SessionError
from profilemate.commands.shared.values import seconds

if TYPE_CHECKING:
    from analysis.judgement.advice.candidate import Setting
    from analysis.judgement.advice.replay import Replayer
    from analysis.summary import Known, Summary
    from analysis.tables.session import Session
    from analysis.whatif.configuration import Choices, Configuration
    from analysis.whatif.outcome import Outcome
    from analysis.whatif.workload import Workload
    from profilemate.simulation.processes import Simulations
    from profilemate.simulation.worker import Task

USUAL_SEC = 20.0
MOST_SEC = 86_400.0
FASTEST = 4_000
"""Requests a second. A configuration whose simulation would have to be faster is not tried."""
MOST_BLOCKS = 20_000_000
"""Blocks of all requests that are read for a replay."""

NoReplayOption = Annotated[
    bool,
    typer.Option("--no-replay", help="Give advice without trying its numbers in a replay."),
]
ReplayFor = Annotated[
    float,
    typer.Option(
        "--replay-for",
        metavar="TIME",
        parser=seconds,
        help="The longest that replays for the advice may take: 20s, 2m.",
    ),
]


class Replays:
    """Replays of one session through vLLM's scheduler, for ``analysis.judgement.advice``.

    Args:
        session: the session.
        read: gives its requests.
        simulations: the processes that simulate.
        seconds: how long all replays may take, from the first one on.

    """

    known: Known = "replayed"

    def __init__(
        self,
        session: Session,
        read: Callable[[], Workload],
        simulations: Simulations,
        seconds: float,
    ) -> None:
        from profilemate.simulation.processes import Deadline

        self._session = session
        self._read = read
        self._simulations = simulations
        self._seconds = seconds
        self.deadline = Deadline(seconds)
        self._failed = ""
        self._outcomes: dict[Configuration, Outcome | None] = {}

    def recorded(self, setting: Setting, value: int) -> Outcome:
        """The recorded configuration, simulated, at the same time as one with the value."""
        from analysis.judgement.advice.replay import NoReplay

        self.deadline.begin()
        try:
            tried = [self._base, *self._configurations(setting, (value,))]
            found = self._simulated(setting, tried)[0]
        except (RuleError, SessionError) as why:
            raise NoReplay(f"The session cannot be replayed: {why}.") from None
        if found is None:
            raise NoReplay(f"The session cannot be replayed: {self._failed}.")
        return found

    def most(self, setting: Setting) -> int:
        """The largest value that can make a difference."""
        from analysis.whatif import configuration, fast

        workload, base = self._read(), self._base
        engines = [workload.of_engine(rank) for rank in workload.engines]
        if setting == "max_num_seqs":
            return max(len(each) for each in engines)
        if setting == "max_num_batched_tokens":
            return int(max(each.input_tokens.sum() for each in engines))
        room = max(_room(each, base) for each in engines)
        if workload.has_contents:
            # It knows of one group. The others have as many contents at most.
            room = max(room, fast.enough(workload) * max(1, len(base.groups)))
        return min(room, configuration.MOST_BLOCKS)

    def at_once(self) -> int:
        """How many configurations are simulated at once."""
        return self._simulations.jobs

    def tried(self, setting: Setting, values: Sequence[int]) -> Sequence[Outcome | None]:
        """The outcome with each value."""
        from analysis.judgement.advice.replay import NoReplay

        try:
            return self._simulated(setting, self._configurations(setting, values))
        except (RuleError, SessionError) as why:
            raise NoReplay(f"The advised setting cannot be replayed: {why}.") from None

    @cached_property
    def _base(self) -> Configuration:
        from analysis.whatif import configuration

        workload = self._read()
        if len(workload) > FASTEST * self._seconds:
            raise SessionError(
                f"{len(workload):,} requests take longer than {self._seconds:g} s; --replay-for "
                "gives more time"
            )
        return configuration.recorded(workload, configuration.Choices())[0]

    @cached_property
    def _task(self) -> Task:
        from analysis.whatif import arrivals
        from analysis.whatif.clock import DEFAULT_SEC, StepTime
        from analysis.whatif.step_time import fit
        from profilemate.simulation.worker import Task

        fitted = fit(self._session, batches=self._base.batches)
        step_time = fitted or StepTime(DEFAULT_SEC)
        workload = arrivals.estimated(self._session, self._read(), step_time)
        return Task(workload, step_time, self._session.begin_sec)

    @cached_property
    def _task_with_prefixes(self) -> Task:
        from analysis.whatif import prefixes

        return replace(self._task, prefixes=prefixes.read(self._session))

    def _configurations(self, setting: Setting, values: Sequence[int]) -> list[Configuration]:
        from analysis.whatif import configuration

        has_contents = self._read().has_contents
        return [
            one
            for value in values
            for one in configuration.configurations(
                self._base, _choices(setting, value), has_contents=has_contents
            )
            or (self._base,)
        ]

    def _simulated(self, setting: Setting, tried: Sequence[Configuration]) -> list[Outcome | None]:
        from analysis.judgement.advice.replay import NoReplay
        from profilemate.simulation.processes import OutOfTime
        from profilemate.simulation.worker import Done, Failed

        new = [one for one in dict.fromkeys(tried) if one not in self._outcomes]
        task = self._task_with_prefixes if setting == "block_size" else self._task
        try:
            found = self._simulations.run(task, new, deadline=self.deadline) if new else []
        except OutOfTime:
            raise NoReplay(
                f"The replay was ended after {self._seconds:g} s; --replay-for gives more time."
            ) from None
        for one, result in zip(new, found, strict=True):
            done = result.figures if isinstance(result, Done) else None
            self._outcomes[one] = done.outcome(one) if done is not None else None
            self._failed = result.reason if isinstance(result, Failed) else self._failed
        return [self._outcomes[one] for one in tried]


def _room(workload: Workload, base: Configuration) -> int:
    """Usable blocks in which the longest requests of one engine run together."""
    from analysis.whatif.groups import most_blocks

    held = workload.input_tokens + np.maximum(workload.output_tokens, 1) - 1
    blocks = np.sort(most_blocks(base.groups, base.block_size, held))[-base.max_num_seqs :]
    return int(np.ceil(blocks.sum() / (1 - min(base.watermark or 0.0, 0.5)))) + 1


def _at_once() -> int:
    """Configurations that are simulated at once. On two processors a second import of vLLM takes
    longer than the simulations."""
    return 2 if (os.cpu_count() or 1) >= 4 else 1


def _choices(setting: Setting, value: int) -> Choices:
    from analysis.whatif.configuration import Choices, Pool

    if setting == "num_blocks":
        return Choices(blocks=(Pool(blocks=value + 1),))
    if setting == "block_size":
        return Choices(block_size=(value,))
    if setting == "max_num_seqs":
        return Choices(max_num_seqs=(value,))
    return Choices(max_num_batched_tokens=(value,))


class Trying:
    """Tries the numbers of a summary's advice, in a thread of its own.

    ``exact`` and ``modelled``: the ways to do it; where both are None, nothing is tried.
    """

    def __init__(self, exact: Replays | None, modelled: Replayer | None) -> None:
        self._exact, self._modelled = exact, modelled
        self._thread = ThreadPoolExecutor(1)
        self._result: Future[Summary] | None = None

    def begin(self, summary: Summary) -> None:
        """Begin to try what the summary's advice names."""
        self._result = self._thread.submit(self._tried, summary)

    def result(self) -> Summary:
        """The summary with the advice that has been tried; it may take a while."""
        assert self._result is not None, "nothing has begun"
        return self._result.result()

    def give_up(self) -> None:
        """End what is under way, soon."""
        if self._exact is not None:
            self._exact.deadline.end_now()

    def _tried(self, summary: Summary) -> Summary:
        from analysis.judgement import summarizing

        is_off = self._exact is None and self._modelled is None
        if is_off or not summarizing.to_replay(summary):
            return summary
        return summarizing.replayed(summary, self._exact, self._modelled)

    def close(self) -> None:
        self._thread.shutdown()


@contextmanager
def replaying(session: Session, *, no_replay: bool, replay_for: float) -> Iterator[Trying]:
    """What tries the numbers of the advice for a session.

    Where the session had preemptions, processes begin to import vLLM now.

    Args:
        session: the session.
        no_replay: whether to try nothing.
        replay_for: seconds that the replays may take.

    Raises:
        RuleError: the time makes no sense.

    """
    if not 0 < replay_for <= MOST_SEC:
        raise RuleError(f"--replay-for is {replay_for:g} s; give more than 0 s and at most 24h")
    if no_replay:
        trying = Trying(None, None)
        yield trying
        trying.close()
        return
    from analysis.judgement.advice.modelled import Modelled
    from analysis.tables import run_totals
    from analysis.whatif import workload
    from profilemate.simulation.processes import Simulations

    @cache
    def read() -> Workload:
        return workload.of_session(session, most_blocks=MOST_BLOCKS)

    with Simulations(_at_once()) as simulations:
        exact = None
        if find_spec("vllm") is not None:
            exact = Replays(session, read, simulations, replay_for)
            totals = run_totals.read(session.directory)
            if totals is not None and totals.preemptions:
                simulations.start()
        trying = Trying(exact, Modelled(read))
        try:
            yield trying
        except BaseException:
            trying.give_up()
            raise
        finally:
            trying.close()
