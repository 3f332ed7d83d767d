# SPDX-License-Identifier: Apache-2.0
"""A workload on the real scheduler, in which a hook of profilemate's raises at a line of choice."""

from __future__ import annotations

import ast
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from profilemate import ROOT
from profilemate.hooks.kv import facts
from tests.kv.children import said
from tests.kv.recording import Clock, found, hooks_only, make_tables
from tests.kv.workload import Driver, Setting, mixed
from tests.kv.workload import scheduler_for as make_scheduler
from tests.support.faults import Lines, Place, tracebacks
from tests.support.oracle import Oracle

SETTING = Setting(blocks=9, max_num_batched_tokens=96)
OPERATIONS = mixed(requests=5, prompts=2, steps=2)


@dataclass(frozen=True)
class Ran:
    """A run of ``OPERATIONS``: what vLLM did, what was said, and what the session has.

    ``tables`` is None where there is no session, ``complete`` as its metadata says.
    """

    steps: list[Any]
    words: list[str]
    tables: dict[str, bytes] | None
    complete: bool


def run(model: Path, lines: Lines, *, tabled: bool = True) -> Ran:
    """Run them under hooks. Without block tables, blocks are listed one by one."""
    folder = Path(tempfile.mkdtemp(prefix="breaking-"))
    try:
        clock = Clock()
        name = found(folder, clock)
        with (
            pytest.MonkeyPatch.context() as patch,
            Oracle().watching() as oracle,
            tracebacks() as shown,
            said() as words,
            hooks_only(folder, clock, name=name),
        ):
            if not tabled:
                patch.setattr(facts, "is_tabled", lambda scheduler, pools: False)
            with lines.watched():
                driver = Driver(make_scheduler(model, SETTING), oracle, clock, SETTING)
                driver.run(OPERATIONS)
        steps = [(step.scheduled, step.running) for step in oracle.steps]
        if not list((folder / name / "journal").glob("*.journal")):
            return Ran(steps, shown + words, None, False)
        made = make_tables(folder / name, folder / "tables")
        return Ran(steps, shown + words, made.bytes_of(), made.metadata["complete"])
    finally:
        shutil.rmtree(folder)


def places_of(model: Path, *, tabled: bool = True) -> tuple[Ran, list[Place]]:
    """A run in which nothing fails, and the lines of profilemate's that run inside vLLM's calls."""
    # Modules are imported the first time.
    run(model, Lines(is_hook), tabled=tabled)
    lines = Lines(is_hook)
    ran = run(model, lines, tabled=tabled)
    return ran, sorted(place for place in lines.seen if place not in unguarded())


def broken(whole: Ran, ran: Ran) -> Iterable[str]:
    """The promises that are broken."""
    if ran.steps != whole.steps:
        yield "vLLM did something else"
    if len(ran.words) > 1 or any("profilemate: " not in line for line in ran.words):
        yield f"it said {ran.words}"
    if ran.complete and ran.tables != whole.tables:
        yield "it says complete, and is not"
    if not ran.words and not ran.complete:
        yield "it is not complete, and says nothing"


def is_hook(frame: FrameType) -> bool:
    """Whether this runs inside a call of vLLM's."""
    code = frame.f_code
    return code.co_name != "<module>" and any(part in code.co_filename for part in _INSIDE)


_INSIDE = (
    "/hooks/kv/",
    "/hooks/gpu/",
    "/hooks/instances.py",
    "/hooks/parts.py",
    "/hooks/producers.py",
    "/record/recorder.py",
)


@cache
def unguarded() -> frozenset[Place]:
    """Lines of the functions that vLLM calls outside of their ``try``.

    Python alone runs there: it calls vLLM's method, looks at the clock, or returns.
    """
    found: set[Place] = set()
    for path in Path(ROOT, "profilemate", "hooks").rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and _calls_vllm(function):
                lines = set(range(function.lineno, (function.end_lineno or 0) + 1))
                found |= {(str(path), line) for line in lines - _guarded(function)}
    return frozenset(found)


def _calls_vllm(function: ast.FunctionDef) -> bool:
    """Whether it stands in the place of a method of vLLM's, or around one."""
    if function.name in ("before", "begin", "after", "end", "failed"):
        return True
    inner = [node for node in function.body if not isinstance(node, ast.FunctionDef)]
    names = {
        node.func.id
        for statement in inner
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return bool(names & {"original", "wrapped", "allocate", "counted", "ours"})


def _guarded(function: ast.FunctionDef) -> set[int]:
    return {
        line
        for node in ast.walk(function)
        if isinstance(node, ast.Try) and node.handlers
        for statement in node.body
        for line in range(statement.lineno, (statement.end_lineno or 0) + 1)
    }
