# SPDX-License-Identifier: Apache-2.0
"""gpu_steps.csv, and what metadata.json says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from profilemate.collector.gpu_steps import TABLE
from profilemate.format.events import More
from tests.collector.journals import (
    EngineJournal,
    WorkerJournal,
    lines,
    make_tables,
    metadata,
    tables_of,
)
from tests.collector.test_experts import SECOND, keep

STEP = [12, 3, 2, 3, 1_500_499, 1, 400_500]


def test_rows(tmp_path: Path) -> None:
    journal = WorkerJournal(tmp_path, rank=2)
    keep(journal, SECOND, More.PHASES, STEP)
    keep(journal, 2 * SECOND, More.PHASES, [0, 3, 0, 3, None, 0, None])
    tables = tables_of(journal)
    assert lines(tables, TABLE) == [
        "1.000000,2,12,3,2,3,1500,1,401",
        "2.000000,2,0,3,0,3,,0,",
    ]
    assert metadata(tables)["processes"][0]["problem"] is None


IMPOSSIBLE: dict[str, Any] = {
    "no token": [0, 0, 0, 0, 5, 0, 0],
    "a request without a token": [1, 0, 2, 0, 5, 0, 0],
    "a decode without a token": [1, 1, 1, 2, 5, 0, 0],
    "fewer than none": [-1, 3, 0, 1, 5, 0, 0],
    "half a token": [1.5, 3, 1, 1, 5, 0, 0],
    "a negative time": [1, 0, 1, 0, -5, 0, 0],
    "too little": [1, 0, 1, 0, 5, 0],
    "too much": [*STEP, 0],
    "a word": "step",
    "a number": 7,
}


@pytest.mark.parametrize("values", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_no_worker_can_have_executed(tmp_path: Path, values: Any) -> None:
    journal = WorkerJournal(tmp_path)
    keep(journal, SECOND, More.PHASES, values)
    tables = tables_of(journal)
    known = metadata(tables)
    assert "a step " in known["processes"][0]["problem"]
    assert not known["complete"]
    assert lines(tables, TABLE) == []


def phases_of(folder: Path, *headers: dict[str, Any], lost: Any = None) -> Any:
    """What metadata.json says with a worker for each of these headers."""
    journals = [WorkerJournal(folder, rank=rank, **each) for rank, each in enumerate(headers)]
    for journal in journals:
        if lost is not None:
            journal.status(lost={"phases": {"tables": TABLE, "reason": lost}})
        journal.killed()
    made = make_tables(journals[0].folder, journals[0].folder / "tables")
    return metadata(made)["phases"]


def test_metadata(tmp_path: Path) -> None:
    asked = {"device": "cuda", "phases": True}
    assert phases_of(tmp_path / "off", {"device": "cuda"}) is None
    assert phases_of(tmp_path / "on", asked, asked) == {"workers": [0, 1], "problem": None}
    assert phases_of(tmp_path / "lost", asked, lost="why") == {"workers": [0], "problem": "why"}


def test_no_gpu(tmp_path: Path) -> None:
    engine = EngineJournal(tmp_path, device="cpu", phases=True)
    engine.killed()
    known = metadata(make_tables(engine.folder, engine.folder / "tables"))
    problem = "no GPU events: the workers run on cpu"
    assert known["phases"] == {"workers": [], "problem": problem}
