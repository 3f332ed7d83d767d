# SPDX-License-Identifier: Apache-2.0
"""Write what a sweep found into its folder: the table and the runs as CSV, and a chart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from profilemate.commands.shared.files import write
from profilemate.installing import pip_install
from profilemate.messages import say

if TYPE_CHECKING:
    from analysis.sweep import Sweep

TABLE = "table.csv"
RUNS = "runs.csv"
CHART = "chart.html"


def write_all(directory: Path, found: Sweep) -> None:
    """Write every file; without plotly, say so and leave the chart out.

    Raises:
        SessionError: a file cannot be written.

    """
    from analysis.renderers import sweep_csv

    write(directory / TABLE, sweep_csv.table(found))
    write(directory / RUNS, sweep_csv.runs(found))
    try:
        from analysis.renderers.html import sweep as page
    except ModuleNotFoundError as error:
        if error.name != "plotly":
            raise
        say(f"no chart: plotly is not installed; {pip_install('report')}")
        return
    write(directory / CHART, page.render(found))
