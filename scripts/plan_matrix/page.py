# SPDX-License-Identifier: Apache-2.0
"""What came of the architectures, as a line each and as the tables of docs/plan-models.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from scripts.plan_matrix.check import Result

NAME = "docs/plan-models.md"
_MARK = "<!-- Written by python -m scripts.plan_matrix --update-docs from here on. -->"
_READINGS = {"equal": "equal", "differs": "**differs**", "not known": "says not known", "": ""}


def line(one: Result) -> str:
    """One architecture in one line."""
    blocks = f", {one.blocks:,} blocks" if one.blocks is not None else ""
    reading = f"; read: {one.reading}" if one.reading else ""
    why = f" ({one.why})" if one.why else ""
    return f"{one.architecture} [{one.family}]: {one.verdict}{blocks} {one.groups}{reading}{why}"


def write(results: Sequence[Result], release: str, path: Path = Path(NAME)) -> None:
    """Write what came of the architectures into the page; what stands before stays."""
    head = path.read_text().partition(_MARK)[0]
    path.write_text(f"{head}{_MARK}\n\n" + "\n".join(_lines(results, release)) + "\n")


def _lines(results: Sequence[Result], release: str) -> list[str]:
    return [
        _summary(results, release),
        "",
        "## Checked",
        "| architecture | groups | bytes of a block | blocks of 60 GiB | without vLLM |",
        "| --- | --- | --- | --- | --- |",
        *(_checked(one) for one in results if one.verdict in ("equal", "keeps nothing", "differs")),
        "",
        "## Refused as vLLM refuses it",
        *_reasons(results, "refused"),
        "",
        "## Not built here",
        (
            "The defaults of a class of configurations are no real model's, and lack what some of "
            "vLLM's classes need. A plan says the reason and goes by its own reading, or refuses."
        ),
        "",
        *_reasons(results, "not known"),
        "",
        "## No configuration",
        *_names(results),
    ]


def _summary(results: Sequence[Result], release: str) -> str:
    counts = Counter(one.verdict for one in results)
    read = Counter(one.reading for one in results)
    built = ("equal", "keeps nothing", "refused", "differs")
    return (
        f"vLLM {release} has {len(results)} architectures. "
        f"{sum(counts[one] for one in built)} could be checked: {counts['equal']} equal vLLM, "
        f"{counts['keeps nothing']} keep nothing and are said to, {counts['refused']} are refused "
        f"as vLLM refuses them, {counts['differs']} differ. {counts['not known']} could not be "
        f"built here, and a plan says so; {counts['no config']} have no configuration to build. "
        f"Without vLLM, the reading of the config.json equals vLLM's class for {read['equal']}, "
        f"says that it does not know {read['not known']}, and differs for {read['differs']}."
    )


def _checked(one: Result) -> str:
    sizes = f"{one.bytes_per_block:,} | {one.blocks:,}" if one.blocks is not None else " | "
    groups = one.groups or "keeps nothing"
    if one.verdict == "differs":
        groups += f" (**differs**: {_cell(one.why)})"
    return f"| {one.architecture} | {groups} | {sizes} | {_READINGS[one.reading]} |"


def _reasons(results: Sequence[Result], verdict: str) -> list[str]:
    found = [one for one in results if one.verdict == verdict]
    if not found:
        return ["None."]
    rows = [f"| {one.architecture} | {_cell(one.why)} |" for one in found]
    return ["| architecture | reason |", "| --- | --- |", *rows]


def _names(results: Sequence[Result]) -> list[str]:
    why: dict[str, list[str]] = {}
    for one in results:
        if one.verdict == "no config":
            why.setdefault(one.why, []).append(one.architecture)
    return [f"* {reason}: {', '.join(names)}" for reason, names in why.items()]


def _cell(text: str) -> str:
    # Paths are of the machine that this ran on.
    plain = re.sub(r"\(?'?/\S+", "...", text)
    return plain.replace("|", "/").replace("<", "&lt;")
