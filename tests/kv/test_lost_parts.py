# SPDX-License-Identifier: Apache-2.0
"""Tomorrow's vLLM: a method that is watched has gone, or is no longer what it was.

The tables that need it are lost, the others are what they would have been, to the byte, and
vLLM does the same as ever.
"""

from __future__ import annotations

import csv
import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest

import analysis
from tests.kv.recording import (
    TABLES,
    Clock,
    Tables,
    found,
    hooks_only,
    make_tables,
    only_session,
)
from tests.kv.workload import Driver, Setting, mixed
from tests.kv.workload import scheduler_for as make_scheduler
from tests.support.oracle import Oracle

pytestmark = pytest.mark.usefixtures("hooks_on")

Change = Callable[[pytest.MonkeyPatch, type, str], None]

BLOCKS = ("kv_cache_usage.csv", "kv_cache_allocations.csv", "kv_cache_evictions.csv")
SETTING = Setting(blocks=14, max_num_batched_tokens=96)
OPERATIONS = mixed(requests=12, prompts=3, steps=3)


def remove(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """The class no longer has the method; only vLLM knows what it calls in its place."""
    original = getattr(owner, name)

    class Moved:
        def __get__(self, instance: Any, _: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith("profilemate.hooks"):
                raise AttributeError(name)
            return MethodType(original, instance)

    patch.setattr(owner, name, Moved())


def extend(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """The method takes something more, by name."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, hint: Any = None, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    signature = inspect.signature(original)
    hint = inspect.Parameter("hint", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = [*signature.parameters.values(), hint]
    method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    patch.setattr(owner, name, method)


def pack(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """The method's result can still be unpacked, but not be indexed or sliced."""
    original = getattr(owner, name)

    class Packed(list[Any]):
        def __getitem__(self, key: Any) -> Any:
            raise TypeError("this is no list any more")

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Packed(original(self, *args, **kwargs))

    patch.setattr(owner, name, method)


POOL = "vllm.v1.core.block_pool.BlockPool"
MANAGER = "vllm.v1.core.kv_cache_manager.KVCacheManager"
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"

LOSSES: list[tuple[str, str, Change, set[str]]] = [
    (POOL, "get_new_blocks", remove, {"blocks"}),
    (POOL, "touch", remove, {"blocks"}),
    (POOL, "free_blocks", remove, {"blocks"}),
    (POOL, "cache_full_blocks", remove, {"blocks"}),
    (POOL, "get_num_free_blocks", remove, {"blocks"}),
    (MANAGER, "free", remove, {"blocks", "frees"}),
    (MANAGER, "get_computed_blocks", remove, {"lookups"}),
    (MANAGER, "get_computed_blocks", pack, {"lookups"}),
    (SCHEDULER, "update_from_output", remove, {"updates"}),
    (SCHEDULER, "add_request", remove, {"requests"}),
    (SCHEDULER, "_free_request", remove, {"requests"}),
    (SCHEDULER, "finish_requests", remove, {"requests"}),
]
LOST_FILES = {
    "blocks": BLOCKS,
    "lookups": ("prefix_cache_lookups.csv",),
    "requests": ("requests.jsonl",),
}
LOST_COLUMNS = {
    "frees": {"preempted_reqs", "preemptions"},
    "lookups": {"hit_tokens", "external_hit_tokens"},
    "blocks": {"num_blocks"},
    "requests": {"finished_reqs"},
    "updates": {"first_token_sec", "step"},
}


class Ran:
    """A run of ``OPERATIONS``: its tables, and the tokens that each step scheduled."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        change: Callable[[pytest.MonkeyPatch], None] = lambda _: None,
    ) -> None:
        clock = Clock()
        folder.mkdir()
        name = found(folder, clock)
        # The oracle is nearest to vLLM: it counts what has another name, too.
        with Oracle().watching() as oracle, pytest.MonkeyPatch.context() as patch:
            change(patch)
            with hooks_only(folder, clock, name=name):
                driver = Driver(make_scheduler(model, SETTING), oracle, clock, SETTING)
                driver.run(OPERATIONS)
        self.steps = [(step.scheduled, step.running) for step in oracle.steps]
        self.tables: Tables = make_tables(only_session(folder), folder / "tables")

    def rows(self, table: str, without: set[str]) -> list[dict[str, Any]]:
        """The table's rows, without these columns."""
        path = self.tables.folder / table
        with path.open(newline="") as lines:
            rows: Any = csv.DictReader(lines) if path.suffix == ".csv" else map(json.loads, lines)
            return [{key: row[key] for key in row if key not in without} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path, hooks_on: None) -> Ran:
    """The same with nothing changed."""
    return Ran(tmp_path_factory.mktemp("whole") / "run", model)


@pytest.mark.parametrize(("path", "method", "change", "lost"), LOSSES)
def test_the_rest_is_recorded(
    path: str,
    method: str,
    change: Change,
    lost: set[str],
    whole: Ran,
    model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    module, _, name = path.rpartition(".")
    owner = getattr(importlib.import_module(module), name)
    ran = Ran(tmp_path / "run", model, lambda patch: change(patch, owner, method))
    assert ran.steps == whole.steps
    (process,) = ran.tables.metadata["processes"]
    assert set(process["lost"]) == lost
    assert process["hooks_failed"] == {}
    assert process["problem"] is None
    assert not ran.tables.metadata["complete"]
    lines = [line for line in capfd.readouterr().err.splitlines() if "profilemate" in line]
    assert len(lines) == 1
    assert "no longer recorded" in lines[0]
    summary = analysis.summarize(analysis.open_session(ran.tables.folder))
    warned = [line for line in summary.warnings if "not recorded to the end" in line]
    assert len(warned) == len(lost)
    files = {file for part in lost for file in LOST_FILES.get(part, ())}
    columns = {column for part in lost for column in LOST_COLUMNS.get(part, ())}
    for table in set(TABLES) - files:
        if table == "kv_cache_usage.csv" and lost & {"requests", "updates"}:
            # What is held within a step is known, what has changed when its results came is not.
            continue
        left_out = columns.copy()
        if "lookups" in lost and table == "kv_cache_allocations.csv":
            left_out.add("request_id")
        assert ran.rows(table, left_out) == whole.rows(table, left_out), table


@pytest.mark.parametrize("method", ["get_new_blocks", "touch", "cache_full_blocks"])
def test_a_method_that_takes_more_loses_nothing(
    method: str, whole: Ran, model: Path, tmp_path: Path
) -> None:
    module, _, name = POOL.rpartition(".")
    owner = getattr(importlib.import_module(module), name)
    ran = Ran(tmp_path / "run", model, lambda patch: extend(patch, owner, method))
    assert ran.steps == whole.steps
    assert ran.tables.metadata["complete"]
    for table in TABLES:
        assert ran.rows(table, set()) == whole.rows(table, set()), table
