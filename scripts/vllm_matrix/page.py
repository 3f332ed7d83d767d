# SPDX-License-Identifier: Apache-2.0
"""What came of the releases, as a line and as the tables of docs/releases.md."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.vllm_matrix.cases import CASES
from scripts.vllm_matrix.check import ROOT, Result

NAME = "docs/releases.md"

_MARK = "<!-- Written by python -m scripts.vllm_matrix --update-docs from here on. -->"
_CASES = ("| case | requests | about |", "| --- | --- | --- |")
_RELEASES = (
    "Evictions, preemptions and reused blocks are those of all cases of a release together.",
    "",
    "| release | | cases | evictions | preemptions | reused | notes |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)
_ROW = re.compile(r"\| (\d+\.[\d.]+) \|")


def line(result: Result) -> str:
    """One release in one line."""
    cases = f", {len(result.cases)} cases" if result.cases else ""
    return f"{result.version:8} {result.verdict.value}{cases}"


def update(result: Result, path: Path = ROOT / NAME) -> None:
    """Put this release's row into the page; rows of others stay as they are."""
    text = path.read_text()
    rows = {match[1]: row for row in text.splitlines() if (match := _ROW.match(row))}
    rows[result.version] = _row(result)
    by_number = sorted(rows, key=lambda version: tuple(map(int, version.split("."))))
    cases = [f"| `{name}` | {case.requests} | {case.title} |" for name, case in CASES.items()]
    written = [_MARK, "", *_CASES, *cases, "", *_RELEASES, *(rows[name] for name in by_number)]
    path.write_text(text.partition(_MARK)[0] + "\n".join(written) + "\n")


def _row(result: Result) -> str:
    left_out = [name for name in CASES if name not in result.cases]
    notes = [reason.replace("|", "\\|") for reason in result.reasons]
    if left_out and not notes:
        notes.append(f"has nothing for {', '.join(left_out)}")
    cells = (
        result.version,
        result.verdict.value,
        len(result.cases),
        result.evictions,
        result.preemptions,
        result.reused,
        "; ".join(notes),
    )
    return f"| {' | '.join(map(str, cells))} |"
