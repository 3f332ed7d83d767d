# SPDX-License-Identifier: Apache-2.0
"""Show what a command is doing: on a terminal's stderr, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def status(what: str) -> Iterator[None]:
    """Show what the command is doing, until it has done it."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


@contextmanager
def bytes_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar that takes the bytes done so far and in all; None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = (what, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("")
        yield lambda done, total: bars.update(bar, completed=done, total=total)


@contextmanager
def bars(labels: Sequence[str], total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar for each label. What it gives takes a label's number, and how many of the total are
    done."""
    if not sys.stderr.isatty():
        yield lambda number, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Elapsed())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks = [shown.add_task(label, total=total, start=True) for label in labels]
        yield lambda number, done: shown.update(tasks[number], completed=done)
