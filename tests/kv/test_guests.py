# SPDX-License-Identifier: Apache-2.0
"""Other tools in the same process stand in the place of vLLM's methods, under and over the hooks.

vLLM does the same, the tools see the same calls, and the tables are the same, to the byte.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profilemate.hooks.kv import watch
from profilemate.record import recorder
from tests.kv.children import said
from tests.kv.recording import Clock, found, hooks_only, make_tables, only_session
from tests.kv.transcript import arrivals, transcript
from tests.support.guests import FORMS, METHODS, Guests
from tests.support.scheduler import build_scheduler

pytestmark = pytest.mark.usefixtures("hooks_on")

OWNERS = {
    "pool": ("vllm.v1.core.block_pool", "BlockPool"),
    "manager": ("vllm.v1.core.kv_cache_manager", "KVCacheManager"),
    "scheduler": ("vllm.v1.core.sched.scheduler", "Scheduler"),
}
PLACES = ("class before", "object before", "class after", "object after")
BLOCKS = 24

Ran = tuple[list[Any], Counter[str], dict[str, bytes], dict[str, Any], list[str]]
"""What vLLM did, how often it called what tools watch, the tables, metadata, and what was said."""


class Beside:
    """A scheduler with tools beside it, which know its parts by the names of ``METHODS``."""

    def __init__(self, place: str, form: str, patch: pytest.MonkeyPatch) -> None:
        self.guests, self.parts = Guests(), dict[str, Any]()
        self._place, self._form, self._patch = place, form, patch
        for owner in OWNERS:
            self._note_what_is_made(owner)

    def build(self, model: Path) -> Any:
        """Make a scheduler, which is watched before or after the tools come, or not at all."""
        if self._place == "class before":
            self._put_on_classes()
        if self._place == "object before":
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("VLLM_PROFILING", "0")
                scheduler = build_scheduler(model, BLOCKS)
            self._put_on_objects()
            watch.watch(scheduler)
        else:
            scheduler = build_scheduler(model, BLOCKS)
        if self._place == "class after":
            self._put_on_classes()
        if self._place == "object after":
            self._put_on_objects()
        self.guests.calls.clear()
        return scheduler

    def _note_what_is_made(self, owner: str) -> None:
        cls = _class_of(owner)
        begin = cls.__init__

        def init(this: Any, *args: Any, **kwargs: Any) -> None:
            self.parts[owner] = this
            begin(this, *args, **kwargs)

        self._patch.setattr(cls, "__init__", init)

    def _put_on_classes(self) -> None:
        for owner, methods in METHODS.items():
            for method, arguments in methods.items():
                known: Callable[[], Any] = lambda owner=owner: self.parts[owner]
                self.guests.on_class(_class_of(owner), method, self._form, arguments, known)

    def _put_on_objects(self) -> None:
        for owner, methods in METHODS.items():
            for method, arguments in methods.items():
                self.guests.on_instance(self.parts[owner], method, self._form, arguments)


def _class_of(owner: str) -> type:
    module, name = OWNERS[owner]
    cls: type = getattr(importlib.import_module(module), name)
    return cls


def run(folder: Path, model: Path, place: str, form: str, *, recorded: bool) -> Ran:
    """Run the workload beside tools of one form in one place."""
    clock = Clock()
    with (
        hooks_only(folder, clock, name=found(folder, clock)),
        pytest.MonkeyPatch.context() as patch,
        said() as lines,
    ):
        if not recorded:
            patch.setenv("VLLM_PROFILING", "0")
        beside = Beside(place, form, patch)
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
    return run(tmp_path_factory.mktemp("alone"), model, "nowhere", "wraps", recorded=True)


@pytest.fixture(scope="module")
def unrecorded(tmp_path_factory: pytest.TempPathFactory, model: Path, hooks_on: None) -> Ran:
    """A tool that sees all calls, and no recording."""
    return run(tmp_path_factory.mktemp("without"), model, "class before", "wraps", recorded=False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", PLACES)
def test_tables_and_calls_are_the_same(
    place: str, form: str, alone: Ran, unrecorded: Ran, model: Path, tmp_path: Path
) -> None:
    did, calls, tables, metadata, lines = run(tmp_path, model, place, form, recorded=True)
    assert did == alone[0] == unrecorded[0]
    # We count free blocks and look up block ids ourselves, too.
    ours = {"get_num_free_blocks", "get_block_ids"}
    for method in unrecorded[1].keys() - ours:
        assert calls[method] == unrecorded[1][method], method
    assert tables == alone[2]
    assert metadata["complete"]
    assert lines == []
