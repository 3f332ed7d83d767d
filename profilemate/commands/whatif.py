# SPDX-License-Identifier: Apache-2.0
"""``profilemate whatif``: what a workload would have done under other configurations."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.errors import RuleError, SessionError
from profilemate.commands.options import After, AsJson, RequestsAfter, folder, opened
from profilemate.commands.reporting import one_line
from profilemate.commands.waiting import waiting

if TYPE_CHECKING:
    from analysis.tables.session import Session
    from analysis.whatif.clock import StepTime
    from analysis.whatif.configuration import Choices, Configuration
    from analysis.whatif.simulated import Simulated
    from analysis.whatif.workload import Workload
    from profilemate.simulation.worker import Task

DEFAULT_BLOCKS = "0.5x,2x,4x"
MOST_JOBS = 256


def _values(name: str, metavar: str, text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        name, metavar=metavar, help=text, show_default=False
    )
    return option


def whatif(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="SESSION|TRACE",
            parser=folder,
            help="A session's folder, or a folder of sessions, of which the newest is taken; or a "
            "trace in the Mooncake format, one request as JSON a line.",
            show_default=False,
        ),
    ] = None,
    blocks: Annotated[
        str | None,
        _values(
            "--blocks",
            "SIZES",
            "Pools: blocks as vLLM counts them (4000), or a factor of the recorded memory (0.5x).",
        ),
    ] = None,
    block_size: Annotated[
        str | None,
        _values("--block-size", "TOKENS", "Tokens a block; without --blocks in the same memory."),
    ] = None,
    max_num_seqs: Annotated[
        str | None, _values("--max-num-seqs", "COUNTS", "Requests that run at once.")
    ] = None,
    max_num_batched_tokens: Annotated[
        str | None, _values("--max-num-batched-tokens", "TOKENS", "Tokens of a step.")
    ] = None,
    prefix_caching: Annotated[
        str | None, _values("--prefix-caching", "on,off", "Prefix caching.")
    ] = None,
    scheduling_policy: Annotated[
        str | None,
        _values("--scheduling-policy", "NAMES", "Order of requests: fcfs, priority."),
    ] = None,
    chunked_prefill: Annotated[
        str | None, _values("--chunked-prefill", "on,off", "Prompts in chunks.")
    ] = None,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast",
            help="Model the cache from the content ids instead: hit rates by size and eviction "
            "rule in seconds, and what holds the hit rate back. Needs no vLLM.",
        ),
    ] = False,
    eviction: Annotated[
        str | None,
        _values(
            "--eviction",
            "RULES",
            "With --fast, which: lru (vLLM's), fifo, lfu, arc, s3-fifo, sieve, belady (the bound).",
        ),
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(
            "--step-ms",
            metavar="MS",
            help="What every step takes, instead of what the session's steps took; of a trace "
            "30 ms unless given.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            metavar="N",
            help="Configurations to replay at once; as many as there are processors unless given. "
            "Each takes about 1 GB.",
            show_default=False,
        ),
    ] = None,
    after: After = 0.0,
    requests_after: RequestsAfter = 0,
    as_json: AsJson = False,
) -> None:
    """Try another configuration on the requests that were recorded.

    The recorded requests go through vLLM's own scheduler, KV cache manager and block pool again,
    with other settings, on a simulated clock: no model, no GPU, no network. It runs wherever
    vLLM can be imported, with the release that is installed there. Several values of a setting
    have commas between them; of several settings, every combination is tried. What is not named
    stays as recorded.

    The first lines are the recorded configuration: as measured, and replayed. How far these two
    are apart is how far to trust the others.

    \b
    Examples:
      profilemate whatif              half, twice and four times the pool, of
                                      the newest session
      profilemate whatif RUN --blocks 0.5x,2x --block-size 16,32
      profilemate whatif RUN --max-num-seqs 64,128 --max-num-batched-tokens 2048
      profilemate whatif RUN --prefix-caching off
      profilemate whatif RUN --fast   from a quarter to 16 times the pool
      profilemate whatif trace.jsonl --blocks 4000,16000 --step-ms 25
      profilemate whatif RUN --json | jq '.outcomes[] | {label, hit_rate}'

    \b
    Exit codes:
      0   done; a configuration that vLLM refuses is told, the others are kept
      2   nothing came of any, no such session, or a wrong option
    """
    with one_line():
        from analysis.renderers import json
        from analysis.renderers.text import whatif as text

        named = {
            "blocks": blocks,
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "prefix_caching": prefix_caching,
            "policy": scheduling_policy,
            "chunked_prefill": chunked_prefill,
        }
        if fast:
            others = {
                "step_ms": None if step_ms is None else f"{step_ms}",
                "jobs": None if jobs is None else f"{jobs}",
            }
            _fast(source, named | others, eviction, (after, requests_after), as_json=as_json)
            return
        if eviction is not None:
            raise RuleError("--eviction: vLLM's own code evicts as it does; add --fast")
        found = _exact(source, named, step_ms, _jobs(jobs), (after, requests_after))
        # A name that the terminal's encoding cannot show must not end it.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        if as_json:
            print(json.render(found))
        else:
            text.write(found, sys.stdout)


def _fast(
    source: Path | None,
    named: dict[str, str | None],
    eviction: str | None,
    warm_up: tuple[float, int],
    *,
    as_json: bool,
) -> None:
    from analysis.renderers import json
    from analysis.renderers.text import miss_ratio_curve
    from profilemate.commands.whatif_fast import modelled

    with waiting("reading the requests"):
        _, workload = _workload(source, warm_up)
    found = modelled(workload, named, eviction)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if as_json:
        print(json.render(found))
    else:
        miss_ratio_curve.write(found, sys.stdout)


def _exact(
    source: Path | None,
    named: dict[str, str | None],
    step_ms: float | None,
    jobs: int,
    warm_up: tuple[float, int],
) -> Simulated:
    from analysis.whatif import arrivals, configuration, prefixes
    from profilemate.simulation.worker import Task

    if find_spec("vllm") is None:
        raise SessionError(
            f"vLLM is not installed for {sys.executable}, and the replay is its own code; run "
            "this with the Python that runs vLLM, or let --fast model it"
        )
    choices = _choices(named)
    with waiting("reading the requests"):
        session, workload = _workload(source, warm_up)
    if not any(named.values()) and workload.measured is not None:
        choices = _choices({"blocks": DEFAULT_BLOCKS})
    base, notes = configuration.recorded(workload, choices)
    others = configuration.configurations(base, choices, has_contents=workload.has_contents)
    step_time, guessed = _step_time(step_ms, session, base)
    if session is not None:
        workload = arrivals.estimated(session, workload, step_time)
    tried = (base, *others)
    known = None
    if session is not None and configuration.goes_into_blocks(workload, tried):
        known = prefixes.read(session)
    notes = (*notes, *guessed, *configuration.doubts(workload, tried, known))
    task = Task(workload, step_time, session.begin_sec if session else 0.0, known)
    return _replayed(task, tried, notes, jobs)


def _choices(named: dict[str, str | None]) -> Choices:
    from analysis.whatif import configuration

    parsers: dict[str, Callable[[str], tuple[object, ...]]] = {
        "blocks": configuration.pools,
        "block_size": configuration.numbers,
        "max_num_seqs": configuration.numbers,
        "max_num_batched_tokens": configuration.numbers,
        "prefix_caching": configuration.switches,
        "policy": lambda text: configuration.words(text, configuration.POLICIES),
        "chunked_prefill": configuration.switches,
    }
    chosen = {}
    for name, given in named.items():
        if given is not None:
            try:
                chosen[name] = parsers[name](given)
            except RuleError as error:
                option = "scheduling-policy" if name == "policy" else name.replace("_", "-")
                raise RuleError(f"--{option}: {error}") from None
    return configuration.Choices(**chosen)  # type: ignore[arg-type]


def _workload(source: Path | None, warm_up: tuple[float, int]) -> tuple[Session | None, Workload]:
    """The requests, and the session that they are of, None of a trace."""
    from analysis.whatif import workload

    if source is not None and source.is_file():
        if any(warm_up):
            raise RuleError(
                "--after and --requests-after: a trace has no warm-up to leave out; cut the file"
            )
        return None, workload.read_workload(source)
    session = opened(source, *warm_up)
    return session, workload.of_session(session)


def _step_time(
    given_ms: float | None, session: Session | None, base: Configuration
) -> tuple[StepTime, tuple[str, ...]]:
    from analysis.whatif.clock import DEFAULT_SEC, StepTime
    from analysis.whatif.step_time import fit

    if given_ms is not None:
        if not 0 < given_ms < 1e6:
            raise RuleError("--step-ms: a step takes more than 0 and less than 1,000,000 ms")
        return StepTime(given_ms / 1e3), ()
    found = fit(session, batches=base.batches) if session else None
    if found is not None:
        return found, ()
    guessed = f"how long steps took is not known: {1e3 * DEFAULT_SEC:g} ms each"
    return StepTime(DEFAULT_SEC), (f"{guessed}, unless --step-ms says otherwise",)


def _jobs(asked: int | None) -> int:
    if asked is None:
        return os.cpu_count() or 1
    if not 1 <= asked <= MOST_JOBS:
        raise RuleError(f"--jobs: from 1 to {MOST_JOBS}")
    return asked


def _replayed(
    task: Task, tried: tuple[Configuration, ...], notes: tuple[str, ...], jobs: int
) -> Simulated:
    """What comes of the configurations, of which the first is the baseline."""
    from analysis.whatif.simulated import Failure, Simulated
    from profilemate.simulation.processes import replay
    from profilemate.simulation.worker import Done

    workload = task.workload
    with _progress([one.label for one in tried], len(workload)) as told:
        results = replay(task, tried, jobs, told)
    outcomes = [
        one.figures.outcome(configuration) if isinstance(one, Done) else None
        for configuration, one in zip(tried, results, strict=True)
    ]
    failures = tuple(
        Failure(configuration.label, one.reason)
        for configuration, one in zip(tried, results, strict=True)
        if not isinstance(one, Done)
    )
    if len(failures) == len(tried):
        raise SessionError(f"nothing could be replayed: {failures[0].reason}")
    measured = workload.measured
    return Simulated(
        name=workload.name,
        requests=len(workload),
        engines=len(workload.engines),
        vllm=next((one.vllm for one in results if isinstance(one, Done)), None),
        recorded_vllm=measured.facts.versions.get("vllm") if measured else None,
        step_time=task.step_time,
        notes=notes,
        measured=measured.outcome if measured else None,
        baseline=outcomes[0],
        outcomes=tuple(one for one in outcomes[1:] if one is not None),
        failures=failures,
    )


@contextmanager
def _progress(labels: list[str], requests: int) -> Iterator[Callable[[int, int], None]]:
    """What shows, on a terminal, how many requests of each configuration have ended."""
    if not sys.stderr.isatty():
        yield lambda number, ended: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Elapsed())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks = [shown.add_task(label, total=requests, start=True) for label in labels]
        yield lambda number, ended: shown.update(tasks[number], completed=ended)
