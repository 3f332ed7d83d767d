# SPDX-License-Identifier: Apache-2.0
"""A scheduler with other tools beside it, which come before or after us."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from profilemate.hooks.kv import watch
from tests.support.guests import METHODS, Guests
from tests.support.scheduler import build_scheduler

OWNERS = {
    "pool": ("vllm.v1.core.block_pool", "BlockPool"),
    "manager": ("vllm.v1.core.kv_cache_manager", "KVCacheManager"),
    "scheduler": ("vllm.v1.core.sched.scheduler", "Scheduler"),
}
PLACES = ("class before", "object before", "class after", "object after")
BLOCKS = 24

Tool = tuple[str, str]
"""One of ``PLACES``, and one of ``FORMS``."""


class Beside:
    """A scheduler with tools beside it, which know its parts by the names of ``METHODS``.

    Tools that come at the same time come in the order in which they are listed.
    """

    def __init__(self, tools: Sequence[Tool], patch: pytest.MonkeyPatch) -> None:
        self.guests, self.parts = Guests(), dict[str, Any]()
        self._tools, self._patch = tools, patch
        for owner in OWNERS:
            self._note_what_is_made(owner)

    def build(self, model: Path) -> Any:
        """Make a scheduler, which is watched before or after the tools come, or not at all."""
        switch = os.environ.get("VLLM_PROFILING", "1")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_PROFILING", "0")
            self._come("class before")
            scheduler = build_scheduler(model, BLOCKS)
            self._come("object before")
            patch.setenv("VLLM_PROFILING", switch)
            watch.watch(scheduler)
        self._come("class after")
        self._come("object after")
        self.guests.calls.clear()
        return scheduler

    def _note_what_is_made(self, owner: str) -> None:
        cls = _class_of(owner)
        begin = cls.__init__

        @functools.wraps(begin)
        def init(this: Any, *args: Any, **kwargs: Any) -> None:
            self.parts[owner] = this
            begin(this, *args, **kwargs)

        self._patch.setattr(cls, "__init__", init)

    def _come(self, place: str) -> None:
        for form in [form for its_place, form in self._tools if its_place == place]:
            for owner, methods in METHODS.items():
                for method, arguments in methods.items():
                    self._put(place, owner, method, form, arguments)

    def _put(self, place: str, owner: str, method: str, form: str, arguments: Any) -> None:
        if place.startswith("class"):
            known = functools.partial(self.parts.__getitem__, owner)
            self.guests.on_class(_class_of(owner), method, form, arguments, known)
        else:
            self.guests.on_instance(self.parts[owner], method, form, arguments)


def _class_of(owner: str) -> type:
    module, name = OWNERS[owner]
    cls: type = getattr(importlib.import_module(module), name)
    return cls
