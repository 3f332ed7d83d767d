# SPDX-License-Identifier: Apache-2.0
"""A sweep as a page of its own: a chart for each figure, over the setting with the most values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from string import Template

from analysis.renderers.html import elements
from analysis.renderers.html.chart import Chart, Figure, Section, Table, axis, count_axis, safe
from analysis.renderers.html.frame import asset, framed
from analysis.sweep import FIGURES, Combination, Repeated, Sweep
from analysis.sweep import Figure as Compared
from analysis.wording.measures import NONE
from analysis.wording.measures import figure as shown
from analysis.wording.sweep import combination

_COLOURS = ("held", "cached", "green", "purple", "regret", "free")
_DASHES = ("solid", "dot", "dash", "dashdot")
_BASELINE = "Hugging Face baseline"


def render(found: Sweep) -> str:
    """The page."""
    section = Section("figures", "Figures", list(charts(found)))
    notes = [*found.doubts, *found.notes]
    if found.no_best is not None:
        notes.insert(0, f"No setting is called the best: {found.no_best}.")
    content = Template(asset("sweep.html")).substitute(
        command=elements.text(" ".join(found.command)),
        directory=elements.text(found.directory),
        notes=elements.paragraphs(notes, "note"),
        sections=elements.section(section),
    )
    return framed("Sweep", "Skip to the charts", elements.links([section]), [section], content)


def charts(found: Sweep) -> Iterator[Chart]:
    """A chart for each figure that any combination has."""
    along = _along(found)
    for compared in FIGURES:
        if any(compared.name in each.figures for each in found.combinations):
            yield _chart(found, compared, along)


def _along(found: Sweep) -> str | None:
    """The setting with the most values, the first of several; None without settings."""
    values: dict[str, set[str]] = {}
    for each in found.combinations:
        for name, value in each.settings.items():
            values.setdefault(name, set()).add(value)
    return max(values, key=lambda name: len(values[name]), default=None)


def _chart(found: Sweep, compared: Compared, along: str | None) -> Chart:
    name = compared.name
    known = [each for each in found.combinations if name in each.figures]
    base = None if found.baseline is None else found.baseline.figures.get(name)
    least = min(known, key=lambda each: each.figures[name].median)
    most = max(known, key=lambda each: each.figures[name].median)
    repeats = "the median of the repeats, with the least and the most" if found.repeats > 1 else ""
    words = (
        f"From {_value(least.figures[name], compared)} ({combination(least.settings)}) to "
        f"{_value(most.figures[name], compared)} ({combination(most.settings)})."
    )
    if base is not None:
        words += f" {_BASELINE}: {_value(base, compared)}."
    return Chart(
        key=name.replace("_", "-"),
        heading=compared.says.rstrip("."),
        look=f"A line for each combination of the other settings; {repeats}.".replace("; .", "."),
        words=words,
        figure=_figure(found, compared, along, base),
        table=Table(
            ("setting", "median", "min", "max"),
            [
                *(_row(combination(each.settings), each.figures[name], compared) for each in known),
                *([_row(_BASELINE, base, compared)] if base is not None else []),
            ],
        ),
    )


def _figure(found: Sweep, compared: Compared, along: str | None, base: Repeated | None) -> Figure:
    lines: dict[str, list[Combination]] = {}
    for each in found.combinations:
        if compared.name in each.figures:
            lines.setdefault(_others(each, along), []).append(each)
    order = list(dict.fromkeys(_place(each, along) for each in found.combinations))
    data = [
        _line(name, combinations, number, compared, along)
        for number, (name, combinations) in enumerate(lines.items())
    ]
    if base is not None:
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": _BASELINE,
                "x": [order[0], order[-1]],
                "y": [base.median * _scale(compared)] * 2,
                "line": {"color": "var(--soft)", "dash": "longdash", "width": 1.5},
            }
        )
    return {
        "data": data,
        "layout": {
            "xaxis": axis(
                safe(along or ""), type="category", categoryorder="array", categoryarray=order
            ),
            "yaxis": count_axis(_unit(compared)),
        },
    }


def _line(
    name: str,
    combinations: Sequence[Combination],
    number: int,
    compared: Compared,
    along: str | None,
) -> Figure:
    figures = [each.figures[compared.name] for each in combinations]
    scale = _scale(compared)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [_place(each, along) for each in combinations],
        "y": [figure.median * scale for figure in figures],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [(figure.most - figure.median) * scale for figure in figures],
            "arrayminus": [(figure.median - figure.least) * scale for figure in figures],
            "visible": any(figure.count > 1 for figure in figures),
        },
        "line": {
            "color": f"var(--{_COLOURS[number % len(_COLOURS)]})",
            "dash": _DASHES[number // len(_COLOURS) % len(_DASHES)],
            "width": 2,
        },
    }


def _place(each: Combination, along: str | None) -> str:
    """Where it stands on the axis."""
    return safe(each.settings.get(along, "") if along else "") or "default"


def _others(each: Combination, along: str | None) -> str:
    others = (f"{name}={value}" for name, value in each.settings.items() if name != along)
    return safe(" ".join(others)) or "sweep"


def _row(label: str, figure: Repeated, compared: Compared) -> Sequence[str]:
    values = (figure.median, figure.least, figure.most)
    return [label, *(shown(value, compared.unit) for value in values)]


def _value(figure: Repeated | None, compared: Compared) -> str:
    return NONE if figure is None else shown(figure.median, compared.unit)


def _scale(compared: Compared) -> float:
    """What a value is drawn at: shares in percent, bytes in GiB."""
    return {"share": 100.0, "bytes": 1 / (1 << 30)}.get(compared.unit, 1.0)


def _unit(compared: Compared) -> str:
    return {"share": "%", "bytes": "GiB"}.get(compared.unit, compared.unit)
