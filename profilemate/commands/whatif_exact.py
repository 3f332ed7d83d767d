# SPDX-License-Identifier: Apache-2.0
"""``profilemate whatif``: recorded requests through vLLM's own scheduler, one configuration after
the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from analysis.errors import RuleError, SessionError
from profilemate.commands.shared.progress import bars

if TYPE_CHECKING:
    from analysis.tables.session import Session
    from analysis.whatif.clock import StepTime
    from analysis.whatif.configuration import Choices, Configuration
    from analysis.whatif.simulated import Simulated
    from analysis.whatif.workload import Workload
    from profilemate.simulation.worker import Done, Failed, Task

MOST_JOBS = 256
DEFAULT_BLOCKS = "0.5x,2x,4x"
"""What is tried where a session's user names no setting."""


def need_vllm() -> None:
    """Raise a SessionError where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise SessionError(
            f"vLLM is not installed for {sys.executable}, and its scheduler makes the simulation; "
            "use the Python that runs vLLM, or --fast, which needs no vLLM"
        )


@dataclass(frozen=True)
class Where:
    """``jobs``: how many configurations to simulate at once on this machine. ``ray``: the address
    of the cluster that does it instead."""

    jobs: int
    ray: str | None = None


def where(jobs: int | None, ray: str | None) -> Where:
    """What the options say.

    Raises:
        RuleError: the number makes no sense, or the options do not go together.
        SessionError: vLLM is needed here, and not installed.

    """
    if ray is None:
        found = Where(processes(jobs))
        need_vllm()
        return found
    if jobs is not None:
        raise RuleError("--jobs: with --ray the cluster says how much runs at once; leave it out")
    return Where(0, ray)


def processes(jobs: int | None) -> int:
    """How many configurations to simulate at once.

    Raises:
        RuleError: the number makes no sense.

    """
    if jobs is None:
        return os.cpu_count() or 1
    if not 1 <= jobs <= MOST_JOBS:
        raise RuleError(f"--jobs is {jobs}; give a number from 1 to {MOST_JOBS}")
    return jobs


def choices(given: Mapping[str, str | None]) -> Choices:
    """What to try of each setting, from what each option says, by the option's name.

    Raises:
        RuleError: an option makes no sense.

    """
    from analysis.whatif import configuration, host_memory
    from analysis.whatif.configuration import numbers, pools, switches

    readers: dict[str, tuple[str, Callable[[str], object]]] = {
        "blocks": ("blocks", pools),
        "block-size": ("block_size", numbers),
        "max-num-seqs": ("max_num_seqs", numbers),
        "max-num-batched-tokens": ("max_num_batched_tokens", numbers),
        "prefix-caching": ("prefix_caching", switches),
        "scheduling-policy": (
            "policy",
            lambda text: configuration.words(text, configuration.POLICIES),
        ),
        "chunked-prefill": ("chunked_prefill", switches),
        "users": ("users", configuration.users),
        "prefix-cache-retention-interval": ("retention_interval", configuration.intervals),
        "host-gib": ("host_gib", host_memory.sizes),
        "host-chunk": ("host_chunk", numbers),
        "host-bandwidth": ("host_bandwidth", host_memory.bandwidths),
        "kv-bytes-per-token": ("token_bytes", configuration.one_number),
    }
    chosen = {}
    for option, text in given.items():
        if text is not None:
            setting, read = readers[option]
            try:
                chosen[setting] = read(text)
            except RuleError as error:
                raise RuleError(f"--{option}: {error}") from None
    return configuration.Choices(**chosen)  # type: ignore[arg-type]


def simulated(
    session: Session | None,
    workload: Workload,
    chosen: Choices,
    *,
    step_ms: float | None,
    where: Where,
) -> Simulated:
    """What becomes of the requests under each configuration.

    Args:
        session: where the requests are from; None for a trace.
        workload: the requests.
        chosen: what to try of each setting.
        step_ms: what a step takes; as in the session by default.
        where: the processes that simulate.

    Raises:
        RuleError: a setting makes no sense, or there is no such cluster.
        SessionError: the requests cannot be simulated, or no configuration came to an end.

    """
    from analysis.whatif import arrivals, configuration, prefixes, users
    from profilemate.simulation.worker import Task

    base, notes = configuration.recorded(workload, chosen)
    others = configuration.configurations(
        base, chosen, has_contents=workload.has_contents, is_recorded=session is not None
    )
    step_time, guessed = _step_time(step_ms, session, base)
    if session is not None:
        workload = arrivals.estimated(session, workload, step_time)
    tried = others if session is None else (base, *others)
    known = None
    if session is not None and configuration.goes_into_blocks(workload, tried):
        known = prefixes.read(session)
    notes = (
        *notes,
        *guessed,
        *configuration.doubts(workload, tried, known),
        *users.notes(workload, chosen.users),
    )
    begin_sec = session.begin_sec if session else float(workload.arrival_sec[workload.counts][0])
    return _outcomes(Task(workload, step_time, begin_sec, known), tried, notes, where)


def _results(
    task: Task,
    tried: tuple[Configuration, ...],
    where: Where,
    progress: Callable[[int, int], None],
) -> list[Done | Failed]:
    if where.ray is not None:
        from profilemate.simulation import on_cluster

        return on_cluster.simulate(where.ray, task, tried, progress)
    from profilemate.simulation.processes import simulate

    return simulate(task, tried, where.jobs, progress)


def _step_time(
    given_ms: float | None, session: Session | None, base: Configuration
) -> tuple[StepTime, tuple[str, ...]]:
    """How long a step takes, and a note where that is a guess."""
    from analysis.whatif.clock import DEFAULT_SEC, StepTime
    from analysis.whatif.step_time import fit

    if given_ms is not None:
        if not 0 < given_ms < 1e6:
            raise RuleError(
                f"--step-ms is {given_ms:g}; give more than 0 and less than 1,000,000 ms"
            )
        return StepTime(given_ms / 1e3), ()
    found = fit(session, batches=base.batches) if session else None
    if found is not None:
        return found, ()
    guess = f"how long steps took is not known: {1e3 * DEFAULT_SEC:g} ms each; --step-ms sets it"
    return StepTime(DEFAULT_SEC), (guess,)


def _outcomes(
    task: Task, tried: tuple[Configuration, ...], notes: tuple[str, ...], where: Where
) -> Simulated:
    """Simulate the configurations, of which a session's first is the recorded one."""
    from analysis.whatif import common
    from analysis.whatif.simulated import Failure, Simulated
    from profilemate.simulation.worker import Done

    workload = task.workload
    with bars([one.label for one in tried], len(workload)) as progress:
        results = _results(task, tried, where, progress)
    left_out = common.left_out([one.figures.lookups for one in results if isinstance(one, Done)])
    outcomes = [
        one.figures.outcome(configuration, left_out, task.step_time)
        if isinstance(one, Done)
        else None
        for configuration, one in zip(tried, results, strict=True)
    ]
    failures = tuple(
        Failure(configuration.label, one.reason)
        for configuration, one in zip(tried, results, strict=True)
        if not isinstance(one, Done)
    )
    if len(failures) == len(tried):
        raise SessionError(f"no configuration could be simulated: {failures[0].reason}")
    measured = workload.measured
    baseline = None if measured is None else outcomes.pop(0)
    was = measured.outcome if measured else None
    return Simulated(
        name=workload.name,
        requests=len(workload),
        warm_up=int((~workload.counts).sum()),
        left_out=len(left_out),
        engines=len(workload.engines),
        vllm=next((one.vllm for one in results if isinstance(one, Done)), None),
        recorded_vllm=measured.facts.versions.get("vllm") if measured else None,
        step_time=task.step_time,
        notes=notes,
        measured=was and common.of_measured(was, workload, task.begin_sec, left_out),
        baseline=baseline,
        outcomes=tuple(one for one in outcomes if one is not None),
        failures=failures,
    )
