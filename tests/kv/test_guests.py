# SPDX-License-Identifier: Apache-2.0
"""Other tools in the same process stand in the place of vLLM's methods, under and over the hooks.

vLLM does the same, the tools see the same calls, and the tables are the same, to the byte.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import pytest

from profilemate.hooks.instances import is_hook
from profilemate.record import recorder
from tests.kv.beside import PLACES, Beside, Tool
from tests.kv.children import said
from tests.kv.recording import Clock, found, hooks_only, make_tables, only_session
from tests.kv.transcript import arrivals, transcript
from tests.support.guests import FORMS, METHODS

pytestmark = pytest.mark.usefixtures("hooks_on")

Ran = tuple[list[Any], Counter[str], dict[str, bytes], dict[str, Any], list[str]]
"""What vLLM did, how often it called what tools watch, the tables, metadata, and what was said."""


def run(folder: Path, model: Path, tools: Sequence[Tool], *, recorded: bool = True) -> Ran:
    """Run the workload beside these tools."""
    clock = Clock()
    with (
        hooks_only(folder, clock, name=found(folder, clock)),
        pytest.MonkeyPatch.context() as patch,
        said() as lines,
    ):
        if not recorded:
            patch.setenv("VLLM_PROFILING", "0")
        beside = Beside(tools, patch)
        try:
            scheduler = beside.build(model)
            did = transcript(scheduler, arrivals(12), lambda: clock.tick(20_000))
        finally:
            beside.guests.leave()
    if not recorded:
        return did, beside.guests.calls, {}, {}, lines
    tables = make_tables(only_session(folder), folder / "tables")
    return did, beside.guests.calls, tables.bytes_of(), tables.metadata, lines


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path, hooks_on: None) -> Ran:
    """Recorded, with no tool beside."""
    return run(tmp_path_factory.mktemp("alone"), model, [])


@pytest.fixture(scope="module")
def unrecorded(tmp_path_factory: pytest.TempPathFactory, model: Path, hooks_on: None) -> Ran:
    """A tool that sees all calls, and no recording."""
    return run(
        tmp_path_factory.mktemp("without"), model, [("class before", "wraps")], recorded=False
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", PLACES)
def test_tables_and_calls_are_the_same(
    place: str, form: str, alone: Ran, unrecorded: Ran, model: Path, tmp_path: Path
) -> None:
    did, calls, tables, metadata, lines = run(tmp_path, model, [(place, form)])
    assert did == alone[0] == unrecorded[0]
    # We count free blocks and look up block ids ourselves, too.
    ours = {"get_num_free_blocks", "get_block_ids"}
    for method in unrecorded[1].keys() - ours:
        assert calls[method] == unrecorded[1][method], method
    assert tables == alone[2]
    assert metadata["complete"]
    assert lines == []


@pytest.mark.parametrize("place", PLACES)
def test_a_recording_that_ends_leaves_the_tools_alone(
    place: str, alone: Ran, unrecorded: Ran, model: Path, tmp_path: Path
) -> None:
    """What ends it comes in mid-run. A tool's wrapper over a hook stays; the hook under it keeps
    nothing any more, and hands each call on."""
    kept: list[int] = []
    with hooks_only(tmp_path), pytest.MonkeyPatch.context() as patch, said() as lines:
        beside = Beside([(place, "wraps")], patch)
        scheduler = beside.build(model)
        (known,) = recorder._living()

        def after_step() -> None:
            kept.append(len(known._events))
            if len(kept) == 5:
                known.fail("schedule", RuntimeError("in mid-run"))

        did = transcript(scheduler, arrivals(12), after_step)
        beside.guests.leave()
    assert did == alone[0]
    ours = {"get_num_free_blocks", "get_block_ids"}
    for method in unrecorded[1].keys() - ours:
        assert beside.guests.calls[method] == unrecorded[1][method], method
    # The thread may have written some of those that waited.
    assert max(kept[5:]) <= kept[4]
    assert len(lines) == 1


@pytest.mark.parametrize("leaves_first", ["tool", "hook"])
def test_both_leave_in_any_order(leaves_first: str, model: Path, tmp_path: Path) -> None:
    with hooks_only(tmp_path), pytest.MonkeyPatch.context() as patch, said():
        beside = Beside([("object after", "wraps")], patch)
        scheduler = beside.build(model)
        (known,) = recorder._living()
        leave = [beside.guests.leave, lambda: known.fail("schedule", RuntimeError("over"))]
        for each in leave if leaves_first == "tool" else leave[::-1]:
            each()
        beside.guests.calls.clear()
        transcript(scheduler, arrivals(4))
    assert not beside.guests.calls
    for part in beside.parts.values():
        # Where the hook left first, the tool has put it back, which hands each call on.
        hooks = [name for name in vars(part) if is_hook(getattr(part, name))]
        assert bool(hooks) == (leaves_first == "hook")


@pytest.mark.parametrize("place", ["class before", "class after"])
def test_what_was_freed_at_once_is_freed_at_once(place: str, model: Path, tmp_path: Path) -> None:
    """Of a scheduler that nobody has any more, without the garbage collector."""
    freed = []
    for switch in ("0", "1"):
        with hooks_only(tmp_path), pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_PROFILING", switch)
            beside = Beside([(place, "wraps")], patch)
            gc.collect()
            gc.disable()
            try:
                scheduler = beside.build(model)
                parts = {name: weakref.ref(part) for name, part in beside.parts.items()}
                beside.parts.clear()
                del scheduler
                freed.append({name for name, part in parts.items() if part() is None})
            finally:
                gc.enable()
                beside.guests.leave()
    assert freed[0] == freed[1]
    assert "scheduler" in freed[1]


WRONG: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
    ("pool", "get_new_blocks", (), {}),
    ("pool", "get_new_blocks", (1, 2), {}),
    ("pool", "get_new_blocks", (1,), {"more": 2}),
    ("pool", "touch", (), {"block": []}),
    ("pool", "free_blocks", ([],), {"no_such": True}),
    ("pool", "cache_full_blocks", (1,), {"request": 2}),
    ("pool", "cache_full_blocks", (), {}),
    ("pool", "reset_prefix_cache", (1,), {}),
    ("manager", "get_computed_blocks", (), {}),
    ("manager", "free", (), {"req": 1}),
    ("scheduler", "schedule", (1, 2, 3), {}),
    ("scheduler", "update_from_output", (1,), {}),
    ("scheduler", "finish_requests", (), {}),
]


@pytest.mark.parametrize(("owner", "method", "args", "kwargs"), WRONG)
def test_what_vllm_refuses_it_refuses_in_the_same_words(
    owner: str,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    model: Path,
    tmp_path: Path,
) -> None:
    words = []
    for switch in ("0", "1"):
        with hooks_only(tmp_path), pytest.MonkeyPatch.context() as patch, said() as lines:
            patch.setenv("VLLM_PROFILING", switch)
            beside = Beside([], patch)
            beside.build(model)
            part = beside.parts[owner]
            assert (method in vars(part)) == (switch == "1")
            with pytest.raises(TypeError) as refused:
                getattr(part, method)(*args, **kwargs)
            words.append(str(refused.value))
        assert lines == []
    assert words[0] == words[1]


def test_a_method_looks_as_before(model: Path, tmp_path: Path) -> None:
    """Its name, its signature, its object and its source, for whatever looks at it."""
    with hooks_only(tmp_path), pytest.MonkeyPatch.context() as patch:
        beside = Beside([], patch)
        beside.build(model)
        for owner, methods in METHODS.items():
            part = beside.parts[owner]
            for method in methods.keys() & vars(part).keys():
                hooked, own = getattr(part, method), getattr(type(part), method)
                assert inspect.ismethod(hooked)
                assert inspect.signature(hooked) == inspect.signature(MethodType(own, part))
                assert (hooked.__qualname__, hooked.__doc__) == (own.__qualname__, own.__doc__)
                assert inspect.getsource(hooked) == inspect.getsource(own)
                assert hooked.__self__ == part
