# SPDX-License-Identifier: Apache-2.0
"""The table and the file of kept results."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import history
from benchmarks.history import Kept
from benchmarks.result import BenchmarkError, Result, Target, unmeasured
from benchmarks.table import render

HERE = "a processor, 2 cores"
NOW = Result("loop", 3.0, 2.9, 3.1, "%", Target(1.5))
BEFORE = Kept("loop", "2026-01-31", HERE, Result("loop", 1.2, 1.1, 1.3, "%", Target(1.5)))


def shown(result: Result, before: Kept) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(render([result], {"loop": before}, HERE))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_regression_shows() -> None:
    text = shown(NOW, BEFORE)
    for words in ("≤ 1.50 %", "1.20 %", "(1.10 … 1.30)", "3 %", "missed, worse", HERE):
        assert words in text


def test_another_machine_is_not_compared() -> None:
    text = shown(NOW, replace(BEFORE, machine="another"))
    assert "missed" in text
    assert "worse" not in text
    assert "2026-01-31, another machine" in text


def test_what_could_not_be_measured_says_why() -> None:
    text = shown(unmeasured("loop", "no vLLM [here]", NOW.target), BEFORE)
    assert "no vLLM [here]" in text
    assert "not measured" in text


def test_kept_results_are_replaced_by_figures_alone(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    other = replace(BEFORE, benchmark="journal", result=replace(BEFORE.result, name="journal"))
    history.write({}, [BEFORE, other], file)
    newer = replace(BEFORE, result=NOW)
    history.write(history.read(file), [newer], file)
    history.write(
        history.read(file), [replace(other, result=unmeasured("journal", "failed"))], file
    )
    assert history.read(file) == {"loop": newer, "journal": other}


def test_damaged_file_is_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert history.read(file) == {}
    for damaged in ("[{", "[{}]", "{}x", "[1]"):
        file.write_text(damaged)
        with pytest.raises(BenchmarkError, match=r"results\.json cannot be read"):
            history.read(file)
