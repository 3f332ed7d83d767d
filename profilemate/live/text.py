# SPDX-License-Identifier: Apache-2.0
"""A session's view as rich draws it: the same for one frame as text and for the terminal.

Text out of the session is printable and never taken for markup. Colours only repeat what words and
characters say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from analysis.wording.formats import byte_size, counted, duration, percent, share
from analysis.wording.printable import printable, shortened
from profilemate.live.holders import Holder
from profilemate.live.rates import Figures, Graphs, Median
from profilemate.live.waiting import WORDS
from profilemate.live.watching import RUNNING, EngineView, View

ORDERS: dict[str, Callable[[EngineView], float]] = {
    "number": lambda engine: engine.engine,
    "usage": lambda engine: -(engine.usage_pct or 0.0),
    "waiting": lambda engine: -engine.waiting,
    "hit rate": lambda engine: _latest(engine).hit_rate or 0.0,
    "evictions": lambda engine: -(_latest(engine).evictions_per_sec or 0.0),
}
"""How engines can be sorted: what needs a look comes first."""

HOLDERS_BY: dict[str, Callable[[Holder], tuple[float, float]]] = {
    "time": lambda holder: (-holder.age_sec, -holder.blocks),
    "blocks": lambda holder: (-holder.blocks, -holder.age_sec),
}

WIDE = 150
"""Columns from which on there are two halves side by side."""
_LONGEST_BAR = 60
_LABEL = 24
_NAME = 40


@dataclass(frozen=True)
class How:
    """How a view is drawn. ``order`` and ``holders_by``: keys of ``ORDERS`` and ``HOLDERS_BY``."""

    width: int = 80
    is_ascii: bool = False
    order: str = "number"
    holders_by: str = "time"
    holders: int = 5


def draw(view: View, how: How) -> RenderableType:
    """The whole view."""
    head = Group(*_head(view))
    if how.width < WIDE or not view.engines:
        return Group(head, *_engines(view, how), *_rest(view, how))
    halves = Table.grid(padding=(0, 2), expand=True)
    halves.add_column(ratio=1)
    halves.add_column(ratio=1)
    half = How(how.width // 2 - 2, how.is_ascii, how.order, how.holders_by, 3 * how.holders)
    halves.add_row(Group(*_engines(view, half)), Group(*_rest(view, half)))
    return Group(head, halves)


def _head(view: View) -> Iterator[Text]:
    state = "bold green" if view.state == RUNNING else "bold yellow"
    yield Text.assemble((printable(view.session_id), "bold"), "  ", (view.state, state))
    versions = [f"{name} {text}" for name, text in view.versions.items() if name == "vllm"]
    known = [view.model, *versions]
    if view.until_sec is not None:
        known.append(f"{duration(view.until_sec)} recorded")
    line = ", ".join(printable(each) for each in known if each)
    if line:
        yield Text(line, style="dim")
    for note in view.notes:
        yield Text(f"Note: {printable(note)}", style="bold yellow")


def _engines(view: View, how: How) -> Iterator[RenderableType]:
    engines = sorted(view.engines, key=ORDERS[how.order])
    if len(engines) > 1:
        yield _overview(engines, how)
    for engine in engines:
        yield Text()
        yield from _engine(engine, how)


def _overview(engines: Sequence[EngineView], how: How) -> Table:
    heads = ("engine", "usage", "held", "cached", "free", "hits", "evict/s", "run", "wait")
    rows = []
    for engine in engines:
        latest = _latest(engine)
        rows.append(
            (
                str(engine.engine),
                percent(engine.usage_pct),
                *(f"{n:,}" for n in (engine.held_blocks, engine.cached_blocks, engine.free_blocks)),
                share(latest.hit_rate),
                _rate(latest.evictions_per_sec),
                f"{engine.running:,}",
                f"{engine.waiting:,}",
            )
        )
    return _table((f"by {how.order}", *heads[1:]), rows)


def _engine(engine: EngineView, how: How) -> Iterator[RenderableType]:
    why = f" ({WORDS[engine.waits_for]})" if engine.waits_for else ""
    yield Text.assemble(
        (f"Engine {engine.engine}", "bold cyan"),
        f"  {counted(engine.running, 'request')} running, {engine.waiting:,} waiting{why}",
    )
    yield _bar(engine, how)
    yield Text(
        f"{'':10}{engine.held_blocks:,} held, {engine.cached_blocks:,} cached, "
        f"{engine.free_blocks:,} free of {counted(engine.total_blocks, 'block')}, "
        f"{engine.peak_held_blocks:,} held at the peak"
    )
    yield _figures([*engine.windows, engine.run], bool(engine.windows))
    yield Text(
        f"In all: {counted(engine.evictions, 'eviction')}, "
        f"{counted(engine.preemptions, 'preemption')}, "
        f"{counted(engine.requests_ended, 'request')} ended"
    )
    if engine.lost:
        lost = ", ".join(map(printable, engine.lost))
        yield Text(f"Note: no longer recorded: {lost}", style="bold yellow")


def _bar(engine: EngineView, how: How) -> Text:
    marks = "#=." if how.is_ascii else "█▒·"
    length = max(10, min(_LONGEST_BAR, how.width - 24))
    parts = [("held", engine.held_blocks), ("cached", engine.cached_blocks)]
    total = engine.total_blocks
    ends, so_far = [], 0
    for _, blocks in parts:
        so_far += blocks
        ends.append(min(length, round(length * so_far / total)) if total else 0)
    held, cached = ends[0], ends[1] - ends[0]
    return Text.assemble(
        (f"{'KV cache':<10}", "bold"),
        (marks[0] * held, "cyan"),
        (marks[1] * cached, "blue"),
        (marks[2] * (length - held - cached), "dim"),
        (f"  {percent(engine.usage_pct)}", "bold"),
    )


def _figures(columns: Sequence[Figures], has_windows: bool) -> Table:
    """The same figures of each window and of the run, side by side."""
    names = [f"last {column.seconds:.0f} s" for column in columns[:-1]] if has_windows else []

    def pair(first: float | None, second: float | None) -> str:
        return f"{_rate(first)} / {_rate(second)}"

    rows: list[tuple[str, Callable[[Figures], str]]] = [
        ("Hit rate, of tokens", lambda of: share(of.hit_rate)),
        ("Evictions a second", lambda of: _rate(of.evictions_per_sec)),
        ("  never reused", lambda of: share(of.never_reused)),
        ("  lifetime, median", lambda of: _median(of.lifetime)),
        ("  idle, median", lambda of: _median(of.idle)),
        ("Preemptions a second", lambda of: _rate(of.preemptions_per_sec)),
        ("Requests in / out a s", lambda of: pair(of.arrived_per_sec, of.ended_per_sec)),
        (
            "Prefill / decode tok/s",
            lambda of: pair(of.prefill_tokens_per_sec, of.decode_tokens_per_sec),
        ),
        ("Steps a second", lambda of: _rate(of.steps_per_sec)),
    ]
    cells = [(label, *(write(column) for column in columns)) for label, write in rows]
    return _table(("", *names, "run"), cells, _LABEL)


def _rest(view: View, how: How) -> Iterator[RenderableType]:
    if view.engines:
        yield Text()
        yield from _holders(view, how)
    yield Text()
    yield _facts(list(_lines(view)))


def _holders(view: View, how: How) -> Iterator[RenderableType]:
    if view.holders is None:
        yield Text.assemble(("Holders of blocks", "bold cyan"), f"  {view.holders_note}")
        return
    title = f"  by {how.holders_by}, of {counted(len(view.holders), 'request')}"
    yield Text.assemble(("Holders of blocks", "bold cyan"), title)
    shown = sorted(view.holders, key=HOLDERS_BY[how.holders_by])[: how.holders]
    name = max(16, min(_NAME, how.width - 40))
    several = len(view.engines) > 1
    rows = [
        (
            f"{holder.engine}: " * several + shortened(holder.request_id, name),
            f"{holder.blocks:,}",
            f"{holder.reused_blocks:,}",
            _time(holder.age_sec),
        )
        for holder in shown
    ]
    if rows:
        yield _table(("request", "blocks", "reused", "for"), rows)


def _lines(view: View) -> Iterator[tuple[str, str]]:
    """What there is to say beside the engines, each under its label."""
    for worker in view.workers:
        window, run = worker.window, worker.run
        if run.executions:
            known = window if window is not None and window.executions else None
            words = f"{_graphs(known)} (run: {_graphs(run)})" if known else _graphs(run)
            yield f"Graphs, worker {worker.worker}", words
    for gpu in view.gpus:
        busy = "" if gpu.utilization_pct is None else f", {gpu.utilization_pct} % busy"
        total = byte_size(gpu.used_bytes + gpu.free_bytes)
        yield f"GPU {gpu.gpu}", f"{byte_size(gpu.used_bytes)} of {total} used{busy}"
    for process in view.processes:
        taken = "not known yet"
        if process.hooks_pct is not None and process.writing_pct is not None:
            taken = f"{process.hooks_pct:.2f} % of a core in hooks"
            taken += f", {process.writing_pct:.2f} % writing"
        if process.dropped_events:
            taken += f"; {counted(process.dropped_events, 'event')} dropped"
        if process.mismatches:
            taken += f"; blocks differ from vLLM's count {counted(process.mismatches, 'time')}"
        yield f"Cost, {printable(process.role)} {process.rank}", taken
    if view.behind_sec is not None and view.longest_behind_sec is not None:
        behind = f"{view.behind_sec:.1f} s behind, {view.longest_behind_sec:.1f} s at most"
        yield "Collector", f"{behind}; figures {view.age_sec or 0.0:.1f} s old"
    if view.disk is not None:
        words = f"{byte_size(view.disk.bytes)} in {counted(view.disk.files, 'file')}"
        if view.segments:
            words += f", {counted(view.segments, 'closed segment')}"
        if view.window_begin_sec is not None:
            words += f"; the tables begin at {duration(view.window_begin_sec)}"
        yield "On disk", words


def _graphs(of: Graphs) -> str:
    return f"{share(of.in_graph)} in a graph, {share(of.padding)} padding"


def _facts(lines: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(min_width=_LABEL - 2, no_wrap=True)
    grid.add_column()
    for label, words in lines:
        grid.add_row(Text(label, style="dim"), Text(words))
    return grid


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], first_width: int | None = None
) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(Text(heads[0]), no_wrap=True, min_width=first_width)
    for head in heads[1:]:
        table.add_column(Text(head), justify="right", no_wrap=True)
    for label, *cells in rows:
        table.add_row(Text(label), *map(Text, cells))
    return table


def _latest(engine: EngineView) -> Figures:
    return engine.windows[0] if engine.windows else engine.run


def _rate(value: float | None) -> str:
    if value is None:
        return "n/a"
    if 0 < value < 0.1:
        return f"{value:.3f}"
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _median(value: Median | None) -> str:
    """The bin, such as ``200 to 500 ms``."""
    if value is None:
        return "n/a"
    if value.to_sec is None:
        return f"over {_time(value.from_sec)}"
    end = _time(value.to_sec)
    if not value.from_sec:
        return f"under {end}"
    begin, unit = _time(value.from_sec).split(" ")
    return f"{begin} to {end}" if end.endswith(f" {unit}") else f"{begin} {unit} to {end}"


def _time(value: float) -> str:
    return (
        f"{1000 * value:.3g} ms"
        if value < 1
        else f"{value:,.3g} s"
        if value < 1000
        else (f"{value:,.0f} s")
    )
