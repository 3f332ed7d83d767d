# SPDX-License-Identifier: Apache-2.0
"""The runs of a sweep side by side: speed and spread, the KV cache, the best, what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from analysis.renderers.text.layout import WIDTH, Line, note, section, table, wrapped
from analysis.renderers.text.painting import paint, plain
from analysis.sweep import Repeated, Sweep, figure
from analysis.wording.formats import counted
from analysis.wording.measures import NONE
from analysis.wording.measures import figure as shown
from analysis.wording.printable import printable
from analysis.wording.sweep import combination

_SPEED = ("output_tokens_per_sec", "total_tokens_per_sec", "latency_sec")
_CACHE = ("blocks", "kv_tokens", "waste", "hit_rate", "preemptions")
_MEMORY = ("gpu_memory_bytes", "host_memory_bytes")

_BASELINE = "baseline"

Cells = tuple[str, ...]


def write(found: Sweep, out: TextIO) -> None:
    """Print the sweep."""
    paint(lambda _: _layout(found), out)


def render(found: Sweep) -> str:
    """The sweep as plain text."""
    return plain(lambda _: _layout(found))


def _layout(found: Sweep) -> Iterator[Line]:
    yield from wrapped("Sweep  ", " ".join(found.command), "label", "title")
    yield ((found.directory, "label"),)
    speed, cache = _tables(found)
    room = WIDTH - 2 - max(_width(speed), _width(cache))
    labels, legend = _labels(found, room)
    yield from section("Settings", legend)
    yield from section("Speed", _table(labels, speed))
    yield from section("KV cache", _table(labels, cache))
    yield from section("Best setting", _best(found))
    yield from section("Baseline", _baseline(found))
    yield from section("Runs that failed", _failed(found))
    yield from section("Notes", _notes(found))


def _labels(found: Sweep, room: int) -> tuple[list[str], list[Line]]:
    """What the combinations are called, under their head: their values, one below the other,
    where these fit; else numbers, and what they stand for. The baseline's comes last."""
    names = list(dict.fromkeys(name for each in found.combinations for name in each.settings))
    rows = [
        [printable(each.settings.get(name) or NONE) for name in names]
        for each in found.combinations
    ]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    last = [_BASELINE] if found.baseline is not None else []
    if names and sum(widths) + 2 * (len(widths) - 1) <= room:
        return [*(_aligned(cells, widths) for cells in [names, *rows]), *last], []
    numbers = [str(number) for number in range(1, len(rows) + 1)]
    legend = [
        line
        for number, each in zip(numbers, found.combinations, strict=True)
        for line in wrapped(f"  {number:>3}  ", combination(each.settings), "label", "")
    ]
    return ["", *numbers, *last], legend if names else []


def _tables(found: Sweep) -> tuple[list[Cells], list[Cells]]:
    """The two tables; memory is in the one where it leaves more room for the settings."""
    speed, cache, memory = _speed(found), _cache(found, _CACHE), _cache(found, _MEMORY)
    choices = [(_beside(speed, memory), cache)]
    if cache[0]:
        choices.append((speed, _beside(cache, memory)))
    return min(choices, key=lambda tables: max(map(_width, tables)))


def _beside(rows: list[Cells], more: list[Cells]) -> list[Cells]:
    """One table beside another; a mark at the end stays there."""
    marked = rows[0][-1:] == ("",)
    return [
        (*cells[:-1], *others, cells[-1]) if marked else (*cells, *others)
        for cells, others in zip(rows, more, strict=True)
    ]


def _speed(found: Sweep) -> list[Cells]:
    """The head, then a row a combination, then the baseline's."""
    names = _known(found, _SPEED)
    main = found.ranked or next(iter(names), None)
    repeated = found.repeats > 1
    if repeated and main is not None:
        # The spread says more than a second figure of the same speed.
        names = [name for name in names if name in (main, "latency_sec")]
    base = found.baseline
    head: list[str] = []
    for name in names:
        head.append(figure(name).heading)
        if name == main and repeated:
            head.append("min to max")
    rows = [
        _speed_row(each.figures, names, main if repeated else None) for each in found.combinations
    ]
    if base is not None:
        head.append("speed-up")
        ups = [
            NONE if each.speed_up is None else f"{each.speed_up:.2f}x"
            for each in found.combinations
        ]
        rows = [(*cells, up) for cells, up in zip(rows, ups, strict=True)]
        own = "1.00x" if base.figures else NONE
        rows.append((*_speed_row(base.figures, names, main if repeated else None), own))
    marked = ["best" if each.best else "close" if each.close else "" for each in found.combinations]
    if any(marked):
        marked += [""] * (len(rows) - len(marked))
        head.append("")
        rows = [(*cells, mark) for cells, mark in zip(rows, marked, strict=True)]
    return [tuple(head), *rows]


def _speed_row(figures: Mapping[str, Repeated], names: Sequence[str], spread: str | None) -> Cells:
    cells = []
    for name in names:
        known = figures.get(name)
        cells.append(NONE if known is None else _rate(name, known.median))
        if name == spread:
            cells.append(
                NONE
                if known is None
                else f"{_rate(name, known.least)} to {_rate(name, known.most)}"
            )
    return tuple(cells)


def _cache(found: Sweep, wanted: Sequence[str]) -> list[Cells]:
    names = _known(found, wanted)
    bases = [found.baseline.figures] if found.baseline is not None else []
    rows = [
        tuple(
            NONE if name not in figures else shown(figures[name].median, figure(name).unit)
            for name in names
        )
        for figures in (*(each.figures for each in found.combinations), *bases)
    ]
    return [tuple(figure(name).heading for name in names), *rows]


def _rate(name: str, value: float) -> str:
    unit = figure(name).unit
    if unit == "s":
        return shown(value, unit)
    return f"{value:,.1f}" if value < 10_000 else f"{value:,.0f}"


def _table(labels: Sequence[str], rows: Sequence[Cells]) -> Iterator[Line]:
    if not rows[0]:
        return
    head, *rest = rows
    yield from table(
        (labels[0], *head),
        [
            (label, *cells)
            for label, cells in zip(labels[1:], rest, strict=True)
            if label != _BASELINE or any(cell != NONE for cell in cells)
        ],
    )


def _best(found: Sweep) -> Iterator[Line]:
    if found.ranked is None or len(found.combinations) < 2:
        return
    by = figure(found.ranked).heading
    for each in found.combinations:
        if each.best:
            least = _rate(found.ranked, each.figures[found.ranked].least)
            yield from note(
                f"{combination(each.settings)}: its worst repeat, {least} {by}, is better "
                "than every repeat of every other setting."
            )
    if found.no_best is not None:
        yield from note(f"None is called the best: {found.no_best}.")
        close = [combination(each.settings) for each in found.combinations if each.close]
        if close:
            yield from note(
                f"Too close to call, marked close: {counted(len(close), 'setting')} with a repeat "
                "at least as good as the best of all worst repeats."
            )
    for doubt in found.doubts:
        yield from wrapped("  - ", doubt, "warning", "warning")


def _baseline(found: Sweep) -> Iterator[Line]:
    base = found.baseline
    if base is None:
        return
    if not base.figures:
        why = base.why or "it has not run yet"
        yield from note(f"There is none: {why}.")
        return
    same = {
        True: "Every run's session has prompts of these lengths.",
        False: "Not every run's session has prompts of these lengths.",
        None: "",
    }[base.same_prompts]
    yield from note(
        f"Hugging Face generate(), {counted(base.batch_size or 1, 'prompt')} at a time, on the "
        f"prompts that the benchmark draws. {same}"
    )


def _failed(found: Sweep) -> Iterator[Line]:
    for run in found.runs:
        if run.state != "done":
            name = _BASELINE if run.settings is None else combination(run.settings)
            yield from wrapped("  ", f"{name}, repeat {run.repeat}: {run.why}", "", "warning")
            yield ((f"    {run.log}", "label"),)
    if found.unfinished:
        yield from note(f"{counted(found.unfinished, 'run')} still to be made.")


def _notes(found: Sweep) -> Iterator[Line]:
    for remark in found.notes:
        yield from note(remark)
    sources = {run.source for run in found.runs if run.settings is not None and run.source}
    if sources == {"session"}:
        yield from note(
            "Tokens a second come from the sessions, from the first arrival to the last end: the "
            "command's output has no figure of them."
        )


def _known(found: Sweep, names: Sequence[str]) -> list[str]:
    """The figures that any run has."""
    bases = [found.baseline.figures] if found.baseline is not None else []
    every = [*(each.figures for each in found.combinations), *bases]
    return [name for name in names if any(name in figures for figures in every)]


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _width(rows: Sequence[Cells]) -> int:
    return sum(2 + max(map(len, column)) for column in zip(*rows, strict=True))
