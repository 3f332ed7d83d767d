# SPDX-License-Identifier: Apache-2.0
"""A sweep as CSV: a row a combination, or a row a run, with figures at full precision."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from analysis.sweep import FIGURES, Repeated, Run, Sweep
from profilemate.format.cells import plain


def table(found: Sweep) -> str:
    """A row a combination, in the sweep's order, and the baseline first."""
    names = _settings(found)
    measured = ("done", "failed", "best", "speed_up")
    spread = [f"{figure.name}{part}" for figure in FIGURES for part in ("", "_min", "_max")]
    rows: list[Sequence[Any]] = []
    if found.baseline is not None:
        base = found.baseline
        rows.append(
            [
                *(f"baseline {base.kind}", *([""] * len(names))),
                *(base.done, base.failed, "", 1.0),
                *_spread(base.figures),
            ]
        )
    for each in found.combinations:
        settings = [each.settings.get(name, "") for name in names]
        rows.append(
            [
                *("sweep", *settings),
                *(each.done, each.failed, int(each.best), each.speed_up),
                *_spread(each.figures),
            ]
        )
    return _written(["kind", *names, *measured, *spread], rows)


def runs(found: Sweep) -> str:
    """A row a run, by the names of their folders; a failed one has no figures, and says why."""
    names = _settings(found)
    head = ["kind", *names, "repeat", "state", "exit_code", "seconds", "source", "why", "session"]
    rows = (_run(run, names) for run in found.runs)
    return _written([*head, *(figure.name for figure in FIGURES)], rows)


def _run(run: Run, names: Sequence[str]) -> list[Any]:
    settings = run.settings or {}
    return [
        "baseline" if run.settings is None else "sweep",
        *(settings.get(name, "") for name in names),
        *(run.repeat, run.state, run.exit_code, run.seconds, run.source),
        *(run.why or "", run.session),
        *(run.figures.get(figure.name) for figure in FIGURES),
    ]


def _settings(found: Sweep) -> list[str]:
    return list(dict.fromkeys(name for each in found.combinations for name in each.settings))


def _spread(figures: Mapping[str, Repeated]) -> list[float | None]:
    cells: list[float | None] = []
    for known in FIGURES:
        figure = figures.get(known.name)
        cells += [None] * 3 if figure is None else [figure.median, figure.least, figure.most]
    return cells


def _written(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    # Settings, paths, and what a failed run said are text of others.
    writer.writerows(
        [plain(cell) if isinstance(cell, str) else cell for cell in row] for row in (head, *rows)
    )
    return out.getvalue()
