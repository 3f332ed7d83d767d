# SPDX-License-Identifier: Apache-2.0
"""``profilemate doctor``: can profilemate record here, and what would be missing?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from profilemate.commands.doctor_findings import Finding, examine
from profilemate.commands.shared.options import AsJson


@dataclass(frozen=True)
class DoctorOptions:
    as_json: AsJson = False


def doctor(options: DoctorOptions) -> int:
    """Check whether profilemate can record vLLM here.

    Shows what would be missing, and what to do. Use the Python and the environment variables that
    you start vLLM with. The check imports vLLM in a process of its own, which takes some seconds,
    and starts nothing else.

    \b
    Examples:
      PYTHONPATH=/path/to/profilemate python -m profilemate doctor
      python -m profilemate doctor --json

    \b
    Exit codes:
      0   everything can be recorded
      1   something would be missing
      2   nothing can be recorded
    """
    findings = list(examine())
    if options.as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    states = {finding.state for finding in findings}
    return 2 if "bad" in states else 1 if "degraded" in states else 0


def _print(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from analysis.wording.printable import printable

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    styles = {"good": "green", "degraded": "yellow", "bad": "red"}
    for finding in findings:
        found = printable(finding.found)
        if finding.advice:
            found += f"\n-> {printable(finding.advice)}"
        state = Text(finding.state, styles[finding.state])
        table.add_row(_short(finding.about), state, Text(found))
    Console(soft_wrap=False).print(table)


def _short(owner: str) -> str:
    """A class by its last module and name."""
    return ".".join(owner.split(".")[-2:]) if owner.count(".") > 1 else owner
