# SPDX-License-Identifier: Apache-2.0
"""The tables of MoE layers, and what no worker can have counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profilemate.collector.worker_totals import WorkerTotals
from profilemate.format.events import More, Op
from profilemate.record import encode
from tests.collector.journals import WorkerJournal, lines, make_tables, metadata, tables_of

EXPERTS, PAIRS = "moe_experts.csv", "moe_pairs.csv"
SECOND = 1_000_000
PAIR = [3, 1, 5, 4, 2.5, 6, 7]
"""Layer, experts, tokens of both, tokens expected, tokens of each."""


def keep(journal: WorkerJournal, at: int, kind: More, values: list[Any]) -> None:
    journal.keep((encode.more, Op.MORE, journal.at(at), kind, values))


def test_rows(tmp_path: Path) -> None:
    journal = WorkerJournal(tmp_path, rank=2)
    counts = [[0, [1, 0, 3], [1, 3]], [7, [2, 2], None]]
    keep(journal, 2 * SECOND, More.EXPERTS, [journal.at(SECOND), 4, counts])
    keep(journal, 3 * SECOND, More.EXPERTS, [journal.at(2 * SECOND), 1, [[0, [0, 1, 0]]]])
    keep(journal, 3 * SECOND, More.EXPERT_PAIRS, [9, [PAIR]])
    tables = tables_of(journal)
    assert lines(tables, EXPERTS) == [
        "2.000000,1.000000,2,0,4,1 0 3,1 3",
        "2.000000,1.000000,2,7,4,2 2,",
        # A journal of before ranks were told apart.
        "3.000000,2.000000,2,0,1,0 1 0,",
    ]
    assert lines(tables, PAIRS) == ["3.000000,2,3,1,5,9,4,2.500,6,7"]
    assert metadata(tables)["processes"][0]["problem"] is None


def test_totals_of_the_whole_run(tmp_path: Path) -> None:
    journal = WorkerJournal(tmp_path, rank=2)
    for at in (1, 2, 3):
        counts = [[0, [1, 0, 3], None], [7, [2, at], [4]]]
        keep(journal, at * SECOND, More.EXPERTS, [journal.at((at - 1) * SECOND), 4, counts])
    (worker,) = json.loads((tables_of(journal) / "totals.json").read_text())["workers"]
    assert worker["experts"] == [
        {"layer": 0, "routed_tokens": 12, "by_expert": [3, 0, 9]},
        {"layer": 7, "routed_tokens": 12, "by_expert": [6, 6]},
    ]


def test_totals_outlive_a_collector() -> None:
    """What one has counted another one goes on with, through JSON."""
    first, second = WorkerTotals(), WorkerTotals()
    first.execute("FULL,8,8,1,0", 7, 1, 0)
    first.route(3, 5, [5, 0])
    second.restore(json.loads(json.dumps(first.saved())))
    for each in (first, second):
        each.route(3, 2, [0, 2, 2])
        each.execute("FULL,8,8,1,0", 7, 1, 0)
    assert (
        first.experts()
        == second.experts()
        == [{"layer": 3, "routed_tokens": 7, "by_expert": [5, 2, 2]}]
    )
    assert first.content() == second.content()


IMPOSSIBLE: dict[str, tuple[More, Any]] = {
    "more than were routed": (More.EXPERTS, [0, 4, [[0, [1, 5]]]]),
    "fewer than none": (More.EXPERTS, [0, 4, [[0, [1, -1]]]]),
    "half a token": (More.EXPERTS, [0, 4, [[0, [1, 0.5]]]]),
    "no experts": (More.EXPERTS, [0, 4, [[0, []]]]),
    "less than no token of a rank": (More.EXPERTS, [0, 4, [[0, [1], [-1]]]]),
    "a layer of too much": (More.EXPERTS, [0, 4, [[0, [1], [1], [1]]]]),
    "no layer": (More.EXPERTS, [0, 4, [["a", [1]]]]),
    "too little": (More.EXPERTS, [0, 4]),
    "too much": (More.EXPERT_PAIRS, [9, [PAIR], 1]),
    "a pair of more than its expert": (More.EXPERT_PAIRS, [9, [[3, 1, 5, 7, 2.5, 6, 7]]]),
    "a pair of more than were routed": (More.EXPERT_PAIRS, [6, [PAIR]]),
    "a pair without chance": (More.EXPERT_PAIRS, [9, [[3, 1, 5, 4, None, 6, 7]]]),
    "a word": (More.EXPERT_PAIRS, "pairs"),
}


@pytest.mark.parametrize(("kind", "values"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_no_worker_can_have_counted(tmp_path: Path, kind: More, values: Any) -> None:
    journal = WorkerJournal(tmp_path)
    if kind == More.EXPERTS:
        values = [journal.at(1 + values[0]), *values[1:]]
    keep(journal, 2 * SECOND, kind, values)
    keep(journal, 3 * SECOND, More.EXPERTS, [journal.at(2 * SECOND), 4, [[0, [4]]]])
    tables = tables_of(journal)
    known = metadata(tables)
    assert "experts that are not counted as such" in known["processes"][0]["problem"] or (
        "that no worker can have counted" in known["processes"][0]["problem"]
    )
    assert not known["complete"]
    assert lines(tables, PAIRS) == []


def test_metadata(tmp_path: Path) -> None:
    first, second = WorkerJournal(tmp_path), WorkerJournal(tmp_path, rank=1)
    counting = {"experts": 8, "chosen": 2, "pairs": True, "problem": None}
    first.status(experts={**counting, "layers": [0, 1], "ranks": 4, "eplb": True})
    second.status(experts={"problem": "vLLM divides a batch in two"})
    first.killed()
    second.killed()
    known = metadata(make_tables(first.folder, first.folder / "tables"))
    problem = "vLLM divides a batch in two"
    assert known["experts"] == {
        **counting,
        "layers": [0, 1],
        "ranks": 4,
        "eplb": True,
        "problem": problem,
    }
    missing = [process["hooks_missing"] for process in known["processes"]]
    assert missing == [{}, {"experts": problem}]


def test_a_status_of_another_kind_is_refused(tmp_path: Path) -> None:
    journal = WorkerJournal(tmp_path)
    journal.status(experts={"layers": ["a"]})
    known = metadata(tables_of(journal))
    assert "experts cannot be" in known["processes"][0]["problem"]
