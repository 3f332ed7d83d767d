# SPDX-License-Identifier: Apache-2.0
"""Which executions of a model runner serve requests, and which are dummies?

Dummy runs, warm-up and captures of CUDA graphs go through the same methods as requests do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from profilemate.hooks.instances import has_method, hook
from profilemate.hooks.parts import Part


class _Running:
    """``dummies`` counts dummy runs under way, ``is_dummy`` says that the execution has one in it
    or around it, and ``warming_up`` is set while vLLM runs made-up requests."""

    def __init__(self) -> None:
        self.dummies = 0
        self.is_dummy = self.warming_up = False

    def begin(self) -> bool:
        """An execution begins. Returns whether it serves requests, as far as is known now."""
        self.is_dummy = self.dummies > 0
        return self.serves

    @property
    def serves(self) -> bool:
        return not (self.is_dummy or self.warming_up)

    def begin_dummy(self) -> None:
        self.dummies += 1
        self.is_dummy = True

    def end_dummy(self, _: None) -> None:
        self.dummies -= 1

    def begin_warm_up(self) -> None:
        self.warming_up = True

    def end_warm_up(self, _: None) -> None:
        self.warming_up = False


def watch(
    worker: Any,
    runner: Any,
    part: Part,
    ended: Callable[[Any, Any], None],
    *,
    begins: Callable[[Any], None] | None = None,
    dropped: Callable[[], None] = lambda: None,
) -> None:
    """Call these functions around each execution that serves requests.

    Where one of them raises, the part is lost.

    Args:
        worker: vLLM's.
        runner: its model runner.
        part: what needs this.
        ended: gets the scheduler's output and the result, when ``execute_model`` has returned.
        begins: gets the scheduler's output, before ``execute_model`` is called.
        dropped: called in place of ``ended``, where a dummy ran in the execution, or it failed.

    Raises:
        AttributeError: the runner has no ``execute_model``.

    """
    running = _Running()
    name = "execute_model"

    def guarded(function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            part.fail(name, error)

    def before(scheduler_output: Any) -> None:
        if running.begin() and begins is not None:
            guarded(begins, scheduler_output)

    def after(result: Any, _: None, scheduler_output: Any) -> None:
        if running.serves:
            guarded(ended, scheduler_output, result)
        else:
            guarded(dropped)

    if has_method(runner, "_dummy_run"):
        part.on_stop(
            hook(runner, "_dummy_run", before=running.begin_dummy, lastly=running.end_dummy)
        )
    part.on_stop(
        hook(
            runner,
            name,
            "scheduler_output",
            before=before,
            after=after,
            failed=lambda *_: guarded(dropped),
            given="place",
        )
    )
    if has_method(worker, "compile_or_warm_up_model"):
        part.on_stop(
            hook(
                worker,
                "compile_or_warm_up_model",
                before=running.begin_warm_up,
                lastly=running.end_warm_up,
            )
        )
