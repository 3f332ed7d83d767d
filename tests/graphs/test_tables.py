# SPDX-License-Identifier: Apache-2.0
"""From a worker to the session's tables: they say what the stand-in and the dispatcher counted."""

from __future__ import annotations

import csv
import gc
from collections import Counter
from pathlib import Path
from typing import Any

from tests.graphs.executor import make, start
from tests.graphs.recording import Execution
from tests.graphs.steps import Output, decode
from tests.kv.recording import make_tables, only_session

Row = dict[str, Any]

TEXT = frozenset(("runtime_mode", "source", "kind", "part"))
TIMES = ("_sec", "_us")


def rows(path: Path) -> list[Row]:
    """A table's rows; None for an empty cell."""

    def read(name: str, cell: str) -> Any:
        if name in TEXT:
            return cell
        return (float if name.endswith(TIMES) else int)(cell) if cell else None

    with path.open(newline="") as file:
        return [
            {name: read(name, cell) for name, cell in row.items()} for row in csv.DictReader(file)
        ]


def batch_of(row: Row) -> tuple[Any, ...]:
    """The batch that a row is about."""
    return tuple(row[name] for name in BATCH)


BATCH = ("runtime_mode", "num_tokens", "num_reqs", "uniform", "has_lora")


def test_tables(model: Path, sessions: Path, cuda: Any, tmp_path: Path) -> None:
    worker = make(model, "Worker")
    start(worker)
    trials = 2 * 3 + 2
    began = len(worker.model_runner.seen)
    for _ in range(3):
        for step in (decode(1), decode(3), Output([5]), Output([30]), Output([9, 1])):
            worker.execute_model(step)
    seen: list[Execution] = worker.model_runner.seen
    del worker
    gc.collect()
    tables = make_tables(only_session(sessions), tmp_path / "tables").folder

    captures = rows(tables / "cuda_graph_captures.csv")
    assert sum(row["num_graphs"] for row in captures) == cuda.count("end")
    assert sum(row["memory_bytes"] for row in captures) == cuda.count("end") * cuda.graph_bytes
    assert sum(row["num_graphs"] for row in captures if row["kind"] == "profiling") == trials
    assert {(row["source"], row["part"], row["worker"]) for row in captures} == {
        ("CUDAGraphWrapper", "model", 0)
    }

    timeline = rows(tables / "cuda_graph_timeline.csv")
    found = [
        Execution(batch_of(row), row["unpadded_tokens"], row["num_graphs"], row["dummy"])
        for row in timeline
    ]
    assert found == [step._replace(dummy=1) for step in seen[:began]] + seen[began:]
    assert sum(row["num_graphs"] for row in timeline) == cuda.count("replay")

    wanted = Counter(step.batch for step in seen if step.graphs)
    usage = rows(tables / "cuda_graph_usage.csv")
    assert {batch_of(row): row["replay_count"] for row in usage if row["replay_count"]} == wanted
    assert len(usage) == 9
    dummies = Counter(step.batch for step in seen[:began] if step.graphs)
    assert {batch_of(row): row["dummy_count"] for row in usage if row["dummy_count"]} == dummies
