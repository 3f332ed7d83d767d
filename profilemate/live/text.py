# SPDX-License-Identifier: Apache-2.0
"""A session's view as rich draws it: the same for one frame as text and for the terminal.

Text out of the session is printable and never taken for markup. Colours only repeat what words and
characters say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from textwrap import wrap

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from analysis.wording.formats import byte_size, counted, duration, percent, share
from analysis.wording.printable import printable, shortened
from profilemate.live.holders import Holder
from profilemate.live.prefixes import Hottest, Prefix
from profilemate.live.rates import Figures, Graphs, Median
from profilemate.live.waiting import WORDS
from profilemate.live.watching import (
    RUNNING,
    EngineView,
    ProcessView,
    SnapshotsView,
    View,
    WorkerView,
)

ORDERS: dict[str, Callable[[EngineView], float]] = {
    "number": lambda engine: engine.engine,
    "usage": lambda engine: -(engine.usage_pct or 0.0),
    "waiting": lambda engine: -(engine.waiting or 0),
    "hit rate": lambda engine: _latest(engine).hit_rate or 0.0,
    "evictions": lambda engine: -(_latest(engine).evictions_per_sec or 0.0),
}
"""How engines can be sorted: what needs a look comes first."""

HOLDERS_BY: dict[str, Callable[[Holder], tuple[float, float]]] = {
    "time": lambda holder: (-holder.age_sec, -holder.blocks),
    "blocks": lambda holder: (-holder.blocks, -holder.age_sec),
}

PREFIXES_BY: dict[str, Callable[[Prefix], tuple[float, ...]]] = {
    "tokens saved": lambda prefix: (-prefix.saved_tokens, -prefix.found),
    "requests": lambda prefix: (-prefix.found, -prefix.saved_tokens),
    "last hit": lambda prefix: (-prefix.last_sec, -prefix.saved_tokens),
}
"""How the hottest prefixes can be sorted."""

WIDE = 150
"""Columns from which on there are two halves side by side."""
_LONGEST_BAR = 60
_LABEL = 24
_NAME = 40


@dataclass(frozen=True)
class How:
    """How a view is drawn. ``order``, ``holders_by`` and ``prefixes_by``: keys of ``ORDERS``,
    ``HOLDERS_BY`` and ``PREFIXES_BY``."""

    width: int = 80
    is_ascii: bool = False
    order: str = "number"
    holders_by: str = "time"
    holders: int = 5
    prefixes_by: str = "tokens saved"
    prefixes: int = 5


def draw(view: View, how: How) -> list[Text]:
    """The whole view, line by line. No line is wider than ``how`` says.

    The lines are put together here, as rich's own tables would take ten times as long every second.
    """
    engines, rest = list(_engines(view, how)), list(_rest(view, how))
    if how.width >= WIDE and engines:
        half = replace(
            how, width=how.width // 2 - 2, holders=3 * how.holders, prefixes=2 * how.prefixes
        )
        engines, rest = _side_by_side(list(_engines(view, half)), list(_rest(view, half)), half), []
    lines = [*_head(view, how), *engines, *rest]
    for line in lines:
        line.truncate(how.width)
    return lines


def _side_by_side(left: list[Text], right: list[Text], half: How) -> list[Text]:
    lines = []
    for one, other in zip_longest(left, right, fillvalue=Text()):
        line = one.copy()
        line.truncate(half.width, pad=True)
        lines.append(Text.assemble(line, "    ", other))
    return lines


def _head(view: View, how: How) -> Iterator[Text]:
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
        for text in wrap(f"Note: {printable(note)}", how.width):
            yield Text(text, style="bold yellow")


def _engines(view: View, how: How) -> Iterator[Text]:
    engines = sorted(view.engines, key=ORDERS[how.order])
    if len(engines) > 1:
        yield Text()
        yield from _overview(engines, how)
    for engine in engines:
        yield Text()
        yield from _engine(engine, how)


def _overview(engines: Sequence[EngineView], how: How) -> list[Text]:
    heads = ("usage", "held", "cached", "free", "hit rate", "evict/s", "run", "wait")
    rows = [
        (
            f"Engine {engine.engine}",
            percent(engine.usage_pct),
            *(f"{n:,}" for n in (engine.held_blocks, engine.cached_blocks, engine.free_blocks)),
            share(_latest(engine).hit_rate),
            _rate(_latest(engine).evictions_per_sec),
            _count(engine.running),
            _count(engine.waiting),
        )
        for engine in engines
    ]
    return _table((f"by {how.order}", *heads), rows)


def _engine(engine: EngineView, how: How) -> Iterator[Text]:
    yield Text.assemble((f"Engine {engine.engine}", "bold cyan"), f"  {_requests(engine)}")
    yield _bar(engine, how)
    yield Text(
        f"{'':10}{engine.held_blocks:,} held, {engine.cached_blocks:,} cached, "
        f"{engine.free_blocks:,} free of {counted(engine.total_blocks, 'block')}, "
        f"{engine.peak_held_blocks:,} held at the peak"
    )
    yield from _figures([*engine.windows, engine.run])
    yield Text(
        f"In all: {counted(engine.evictions, 'eviction')}, "
        f"{counted(engine.preemptions, 'preemption')}, "
        f"{counted(engine.requests_ended, 'request')} ended"
    )
    if engine.lost:
        lost = ", ".join(map(printable, engine.lost))
        yield Text(f"Note: no longer recorded: {lost}", style="bold yellow")


def _requests(engine: EngineView) -> str:
    if engine.paused_since_sec is not None:
        return f"paused since {duration(engine.paused_since_sec)}: blocks are as of then"
    why = f" ({WORDS[engine.waits_for]})" if engine.waits_for else ""
    return (
        f"{counted(engine.running or 0, 'request')} running, {engine.waiting or 0:,} waiting{why}"
    )


def _bar(engine: EngineView, how: How) -> Text:
    marks = "#=." if how.is_ascii else "█▒·"
    length = max(10, min(_LONGEST_BAR, how.width - 24))
    total = max(1, engine.total_blocks)
    held = min(length, round(length * engine.held_blocks / total))
    used = round(length * (engine.held_blocks + engine.cached_blocks) / total)
    cached = max(0, min(length, used) - held)
    return Text.assemble(
        (f"{'KV cache':<10}", "bold"),
        (marks[0] * held, "cyan"),
        (marks[1] * cached, "blue"),
        (marks[2] * (length - held - cached), "dim"),
        (f"  {percent(engine.usage_pct)}", "bold"),
    )


def _figures(columns: Sequence[Figures]) -> list[Text]:
    """The same figures of each window and of the run, side by side."""
    names = [f"last {column.seconds:.0f} s" for column in columns[:-1]]

    def pair(first: float | None, second: float | None) -> str:
        return f"{_rate(first)} / {_rate(second)}"

    rows: list[tuple[str, Callable[[Figures], str]]] = [
        ("Hit rate, of tokens", lambda of: share(of.hit_rate)),
        ("Evictions a second", lambda of: _rate(of.evictions_per_sec)),
        ("  regretted", lambda of: _rate(of.regretted_per_sec)),
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


def _rest(view: View, how: How) -> Iterator[Text]:
    if view.engines:
        yield Text()
        yield from _holders(view, how)
        if view.hottest is not None:
            yield Text()
            yield from _prefixes(view.hottest, view.until_sec or 0.0, how)
        yield Text()
    for label, words in _facts(view):
        for number, text in enumerate(wrap(words, max(20, how.width - _LABEL))):
            head = "" if number else label
            yield Text.assemble((f"{head:<{_LABEL}}", "dim"), text)


def _holders(view: View, how: How) -> Iterator[Text]:
    if view.holders is None:
        for number, text in enumerate(wrap(f"Holders of blocks  {view.holders_note}", how.width)):
            line = Text(text)
            if not number:
                line.stylize("bold cyan", 0, 17)
            yield line
        return
    title = f"  by {how.holders_by}, of {counted(len(view.holders), 'request')}"
    yield Text.assemble(("Holders of blocks", "bold cyan"), title)
    shown = sorted(view.holders, key=HOLDERS_BY[how.holders_by])[: how.holders]
    width = max(16, min(_NAME, how.width - 40))
    several = len(view.engines) > 1
    rows = [
        (
            f"{holder.engine}: " * several + shortened(holder.request_id, width),
            f"{holder.blocks:,}",
            f"{holder.reused_blocks:,}",
            _time(holder.age_sec),
        )
        for holder in shown
    ]
    if rows:
        yield from _table(("request", "blocks", "reused", "for"), rows)


def _prefixes(hottest: Hottest, until_sec: float, how: How) -> Iterator[Text]:
    ended = counted(hottest.requests, "request")
    title = f"  by {how.prefixes_by}, of {ended} that ended in the last {hottest.seconds:.0f} s"
    yield Text.assemble(("Hottest prefixes", "bold cyan"), title)
    prefixes = sorted(hottest.prefixes, key=PREFIXES_BY[how.prefixes_by])
    several = len({prefix.engine for prefix in prefixes}) > 1
    left = dict.fromkeys((prefix.engine for prefix in prefixes), how.prefixes)
    rows = []
    for prefix in prefixes:
        left[prefix.engine] -= 1
        if left[prefix.engine] >= 0:
            rows.append(
                (
                    f"{prefix.engine}: " * several
                    + f"{prefix.begin_token:,} to {prefix.end_token:,}",
                    f"{prefix.content_id}",
                    f"{prefix.found:,}",
                    f"{prefix.saved_tokens:,}",
                    _time(max(0.0, until_sec - prefix.first_sec)),
                    _time(max(0.0, until_sec - prefix.last_sec)),
                )
            )
    if rows:
        heads = ("tokens", "content id", "hits", "saved", "first hit", "last hit")
        yield from _table(heads, rows)


def _facts(view: View) -> Iterator[tuple[str, str]]:
    """What there is to say beside the engines, each under its label."""
    for worker in view.workers:
        window, run = worker.window, worker.run
        if run.executions:
            known = window if window is not None and window.executions else None
            words = f"{_graphs(known)} (run: {_graphs(run)})" if known else _graphs(run)
            yield f"Graphs, worker {worker.worker}", words
        if worker.run_expert_imbalance is not None:
            yield f"Experts, worker {worker.worker}", _experts(worker)
    for gpu in view.gpus:
        busy = "" if gpu.utilization_pct is None else f", {gpu.utilization_pct} % busy"
        total = byte_size(gpu.used_bytes + gpu.free_bytes)
        yield f"GPU {gpu.gpu}", f"{byte_size(gpu.used_bytes)} of {total} used{busy}"
    for process in view.processes:
        yield f"Cost, {printable(process.role)} {process.rank}", _cost(process)
    if view.behind_sec is not None and view.longest_behind_sec is not None:
        behind = f"{view.behind_sec:.1f} s behind, {view.longest_behind_sec:.1f} s at most"
        yield "Collector", f"{behind}; figures {view.age_sec or 0.0:.1f} s old"
    if view.snapshots is not None:
        yield "Snapshots", _snapshots(view.snapshots)
    if view.disk is not None:
        words = f"{byte_size(view.disk.bytes)} in {counted(view.disk.files, 'file')}"
        if view.segments:
            words += f", {counted(view.segments, 'closed segment')}"
        if view.window_begin_sec is not None:
            words += f"; the tables begin at {duration(view.window_begin_sec)}"
        yield "On disk", words


def _snapshots(found: SnapshotsView) -> str:
    words = f"{found.taken:,} taken"
    if found.left_out:
        words += f", {found.left_out:,} left out by the limit"
    if found.failed:
        words += f", {found.failed:,} failed"
    if found.last_name is not None:
        words += f"; the last one: {printable(found.last_name)}"
    if found.last_reason is not None:
        words += f" ({printable(found.last_reason)})"
    return words


def _cost(process: ProcessView) -> str:
    words = "not known yet"
    if process.hooks_pct is not None and process.writing_pct is not None:
        words = f"{process.hooks_pct:.2f} % of a core in hooks, {process.writing_pct:.2f} % writing"
    if process.dropped_events:
        words += f"; {counted(process.dropped_events, 'event')} dropped"
    if process.mismatches:
        words += f"; blocks differ from vLLM's count {counted(process.mismatches, 'time')}"
    return words


def _graphs(of: Graphs) -> str:
    return f"{share(of.in_graph)} in a graph, {share(of.padding)} padding"


def _experts(worker: WorkerView) -> str:
    run = f"{worker.run_expert_imbalance:.2f}"
    if worker.expert_imbalance is None:
        return f"the busiest has {run} times the mean"
    return f"the busiest has {worker.expert_imbalance:.2f} times the mean (run: {run})"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], first_width: int = 0) -> list[Text]:
    """Columns aligned to the right, the first one to the left, two apart."""
    widths = [max(map(cell_len, column)) for column in zip(heads, *rows, strict=True)]
    widths[0] = max(widths[0], first_width)
    lines = []
    for number, (label, *cells) in enumerate((heads, *rows)):
        figures = [
            " " * (2 + width - cell_len(cell)) + cell
            for cell, width in zip(cells, widths[1:], strict=True)
        ]
        text = set_cell_size(label, widths[0]) + "".join(figures)
        lines.append(Text(text, style="" if number else "dim"))
    return lines


def _latest(engine: EngineView) -> Figures:
    return engine.windows[0] if engine.windows else engine.run


def _count(value: int | None) -> str:
    return "n/a" if value is None else f"{value:,}"


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
