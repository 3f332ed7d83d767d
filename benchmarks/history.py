# SPDX-License-Identifier: Apache-2.0
"""The last result of each benchmark that was kept: benchmarks/results.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.result import BenchmarkError, Result

FILE = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Kept:
    """A result, its benchmark, and the machine that it was measured on."""

    benchmark: str
    """Its name in the catalogue."""
    date: str
    machine: str
    result: Result

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "result": self.result.as_json()}


def read(file: Path = FILE) -> dict[str, Kept]:
    """What was kept, by the results' names.

    Raises:
        BenchmarkError: the file is damaged.

    """
    try:
        rows = json.loads(file.read_text())
        kept = [Kept(**{**row, "result": Result.from_json(row["result"])}) for row in rows]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(
            f"{file.name} cannot be read ({error}): git checkout benchmarks/{file.name}"
        ) from None
    return {row.result.name: row for row in kept}


def write(known: Mapping[str, Kept], new: Iterable[Kept], file: Path = FILE) -> None:
    """Put the new results in the places of the old ones; those without a figure are left out."""
    rows = {**known, **{row.result.name: row for row in new if row.result.figure is not None}}
    content = json.dumps([row.as_json() for row in rows.values()], indent=1, ensure_ascii=False)
    scratch = file.with_suffix(".new")
    scratch.write_text(content + "\n")
    scratch.replace(file)
