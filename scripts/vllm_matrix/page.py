# SPDX-License-Identifier: Apache-2.0
"""What came of the releases, as a line and as the tables of docs/releases.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from scripts.vllm_matrix import facts
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
_FACTS = (
    "What the releases do differently, found by driving each of them:",
    "",
    "| | up to | | from | |",
    "| --- | --- | --- | --- | --- |",
)
_ROW = re.compile(r"\| (\d+\.[\d.]+) \|")


def line(result: Result) -> str:
    """One release in one line."""
    cases = f", {len(result.cases)} cases" if result.cases else ""
    return f"{result.version:8} {result.verdict.value}{cases}"


def update(result: Result, path: Path = ROOT / NAME) -> None:
    """Put this release's row into the page; all else stays as it is."""
    releases, facts = _rows(path)
    releases[result.version] = _row(result)
    _write(path, releases, facts)


def update_facts(results: Sequence[Result], path: Path = ROOT / NAME) -> None:
    """Put into the page what changed from one of these releases to the next."""
    releases, _ = _rows(path)
    _write(path, releases, [_cells(*change) for change in changes(results)])


def changes(results: Sequence[Result]) -> Iterator[tuple[str, str, str, str, str]]:
    """Each fact that changes: its name, the last release before and what is seen there, and the
    first one after and what is seen there."""
    tried = [result for result in results if result.facts]
    for name in facts.FACTS:
        for before, after in pairwise(tried):
            if before.facts[name] != after.facts[name]:
                yield name, before.version, before.facts[name], after.version, after.facts[name]


def facts_of(version: str, path: Path = ROOT / NAME) -> dict[str, str]:
    """What the page says of this release, by fact."""
    found: dict[str, str] = {}
    for row in _rows(path)[1]:
        name, _, before, since, after = (cell.strip() for cell in row.strip("|").split(" | "))
        found.setdefault(name, before)
        if _numbers(since) <= _numbers(version):
            found[name] = after
    return found


def _rows(path: Path) -> tuple[dict[str, str], list[str]]:
    lines = path.read_text().splitlines()
    releases = {match[1]: row for row in lines if (match := _ROW.match(row))}
    at = lines.index(_FACTS[-1]) + 1 if _FACTS[-1] in lines else len(lines)
    return releases, lines[at:]


def _write(path: Path, releases: dict[str, str], facts: list[str]) -> None:
    by_number = [releases[version] for version in sorted(releases, key=_numbers)]
    cases = [_cells(f"`{name}`", case.requests, case.title) for name, case in CASES.items()]
    written = [_MARK, "", *_CASES, *cases, "", *_RELEASES, *by_number, "", *_FACTS, *facts]
    path.write_text(path.read_text().partition(_MARK)[0] + "\n".join(written) + "\n")


def _row(result: Result) -> str:
    left_out = [name for name in CASES if name not in result.cases]
    notes = list(result.reasons)
    if left_out and not notes:
        notes.append(f"has nothing for {', '.join(left_out)}")
    return _cells(
        result.version,
        result.verdict.value,
        len(result.cases),
        result.evictions,
        result.preemptions,
        result.reused,
        "; ".join(notes),
    )


def _cells(*cells: object) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
