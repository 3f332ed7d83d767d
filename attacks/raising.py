# SPDX-License-Identifier: Apache-2.0
"""An error at each line of profilemate's that runs inside vLLM's calls, or that writes.

The workload runs on vLLM's real scheduler. Each attempt raises one error at one line, and compares
what vLLM did and what the session says with a run in which nothing was raised.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rich.progress import track

from attacks.figure import Figure
from attacks.watching import watch_schedulers
from tests.kv import breaking, test_raising
from tests.kv.breaking import broken, is_hook, places_of
from tests.support.faults import Lines, Place
from tests.support.scheduler import write_model

Attempt = Callable[[], list[str]]

HOOK_ERRORS: tuple[type[Exception], ...] = (MemoryError, RuntimeError, RecursionError, KeyError)
THREAD_ERRORS: tuple[type[BaseException], ...] = (
    MemoryError,
    RecursionError,
    SystemExit,
    KeyboardInterrupt,
)


def run_attempts(attempts: list[Attempt]) -> tuple[Counter[str], int]:
    """How often which promise was broken, and how many attempts broke one."""
    found: Counter[str] = Counter()
    bad = 0
    for attempt in track(attempts, "raising"):
        problems = attempt()
        found.update(problem.split(" [")[0] for problem in problems)
        bad += bool(problems)
    return found, bad


def hook_attempts(model: Path) -> Iterator[Attempt]:
    """Errors in hooks, with block tables and without."""
    for tabled in (True, False):
        whole, places = places_of(model, tabled=tabled)
        for place in places:
            for error in HOOK_ERRORS:
                yield partial(_in_hook, model, tabled, whole, place, error)


def _in_hook(
    model: Path, tabled: bool, whole: breaking.Ran, place: Place, error: type[Exception]
) -> list[str]:
    try:
        ran = breaking.run(model, Lines(is_hook, error, place=place), tabled=tabled)
    except Exception as escaped:
        return [f"{type(escaped).__name__} reached vLLM"]
    return list(broken(whole, ran))


def thread_attempts(folder: Path) -> Iterator[Attempt]:
    """Errors in the thread that writes."""
    lines = Lines(test_raising.is_written)
    test_raising.run(folder, lines)
    for place in sorted(lines.seen):
        for error in THREAD_ERRORS:
            yield partial(_in_thread, folder, place, error)


def _in_thread(folder: Path, place: Place, error: type[BaseException]) -> list[str]:
    ran = test_raising.run(folder, Lines(test_raising.is_written, error, place=place))
    try:
        test_raising.check(ran, place)
    except AssertionError:
        return ["events were lost without being counted, or said twice"]
    return []


def run(count: int, seed: int, folder: Path) -> list[Figure]:
    watch_schedulers()
    model = write_model(folder / "model")
    in_hooks, in_thread = list(hook_attempts(model)), list(thread_attempts(folder))
    chance = random.Random(seed)
    for attempts in (in_hooks, in_thread):
        chance.shuffle(attempts)
    # Half of them each, where both have as many.
    in_thread = in_thread[: max(count // 2, count - len(in_hooks))]
    in_hooks = in_hooks[: count - len(in_thread)]
    problems, bad = run_attempts([*in_thread, *in_hooks])
    return [
        Figure("errors raised where events are written", len(in_thread)),
        Figure("errors raised in hooks", len(in_hooks)),
        Figure("attempts that broke a promise", bad, most=0),
        *(Figure(problem, times, most=0) for problem, times in problems.items()),
    ]
