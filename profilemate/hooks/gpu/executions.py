# SPDX-License-Identifier: Apache-2.0
"""Record a model runner's executions: which batch each was dispatched to, and what ran.

An execution is the outermost call of ``execute_model`` or ``_dummy_run``. Each of vLLM's two model
runners has another function that decides how it runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import orjson

from profilemate.format.events import Op
from profilemate.hooks.gpu.graph_sources import Batch, batch_of, batch_of_execution
from profilemate.hooks.gpu.graphs import MAX_NS, Entry, Graphs
from profilemate.hooks.instances import has_method, hook
from profilemate.record import encode

_now, _served, _EXECUTION = time.monotonic_ns, encode.served, Op.EXECUTION


class Executions:
    """Records one model runner's executions, in the journal of its ``graphs``.

    ``depth`` counts the calls under way. ``answer`` is what the dispatch of the execution under way
    returned, None until then; ``is_dispatched`` says whether a dispatch is watched at all.
    ``dummy_tokens`` is the size of a dummy batch, None where the execution serves requests.
    ``warming_up`` is set while vLLM runs made-up requests: all that runs then is a dummy.
    """

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self.depth = 0
        self.answer: Any = None
        self.is_dispatched = False
        self.dummy_tokens: int | None = None
        self.warming_up = False
        self._recent = graphs.recent
        self._recorder = graphs.recorder
        self._keep = graphs.recorder.keep
        self._timer = graphs.timer
        self._numbers: dict[Batch, int] = {}

    def begin(self) -> None:
        """An execution begins."""
        if self._recent:
            self.graphs.record_recent()
        self.answer = self.dummy_tokens = self.graphs.captured = None

    def dispatched(self, answer: Any) -> None:
        """The execution under way was dispatched."""
        self.answer = answer

    def end(self, scheduler_output: Any) -> None:
        """The execution ended, well or not. A dummy has no scheduler output."""
        ended = _now()
        recent, recorder = self._recent, self._recorder
        if (recorder.wants_pause or recorder.is_paused) and self.graphs.is_paused():
            return
        if len(recent) == 1 and self.dummy_tokens is None and not (self.warming_up or self._timer):
            # Every step of a server comes here: the same as below, in as few calls as possible.
            (entry,) = recent
            if entry.of_model and entry.launch_ns < MAX_NS:
                tokens = scheduler_output.total_num_scheduled_tokens
                recent.clear()
                graphs, launch_ns = entry.graphs, entry.launch_ns
                self._keep((_served, _EXECUTION, ended, tokens, entry.number, graphs, launch_ns))
                entry.graphs = entry.launch_ns = 0
                recorder.step_ended()
                return
        self._record(ended, scheduler_output)

    def _record(self, ended: int, scheduler_output: Any) -> None:
        recent = self._recent
        entry = _take(recent, True) if recent else None
        tokens = self.dummy_tokens
        dummy = self.warming_up or tokens is not None
        if tokens is None:
            tokens = int(scheduler_output.total_num_scheduled_tokens)
        batch: int | None = 0
        if entry is None:
            entry, batch = self._without_model_graph(tokens, dummy)
        if batch is not None:
            self.graphs.record_execution(ended, entry, batch, tokens, dummy)
        if recent:
            self.graphs.record_recent()
        if batch is None and self._timer is not None:
            # Nothing ran, and the next call may be long in coming.
            self._timer.give_up()
        self._recorder.step_ended()

    def _without_model_graph(self, tokens: int, dummy: bool) -> tuple[Entry | None, int | None]:
        """The entry that an execution without a known graph of the model replayed, and its batch.

        Where the execution was dispatched to a graph, a replayed graph of unknown origin is taken
        for the model's: a release may capture where this does not look. Where nothing was replayed,
        the batch was captured or ran eagerly, whatever it was dispatched to. None in place of the
        batch's number: nothing ran.
        """
        batch = _dispatched(self.answer)
        if batch is not None and batch.mode != "NONE" and self._recent:
            entry = _take(self._recent, None)
            if entry is not None:
                return entry, self._number(batch)
        if self.graphs.captured is not None:
            return None, self._number(self.graphs.captured)
        if batch is not None:
            tokens = batch.num_tokens
        elif self.answer is None and self.is_dispatched and not dummy:
            return None, None
        return None, self._number(Batch("NONE", tokens, None, 0, 0)) if tokens else None

    def _number(self, batch: Batch) -> int:
        number = self._numbers.get(batch)
        if number is None:
            number = self._numbers[batch] = len(self._numbers) + 1
            description = orjson.dumps(list(batch))
            self._keep((encode.blob, Op.BATCH, _now(), number, description))
        return number


def _dispatched(answer: Any) -> Batch | None:
    """The batch in a dispatch's answer. None: it has none, as in 0.10 for an eager batch."""
    if answer is None:
        return None
    first, second, *_ = answer
    if hasattr(first, "cg_mode"):
        return batch_of_execution(first)
    return None if second is None else batch_of(first, second)


def _take(recent: list[Entry], of_model: bool | None) -> Entry | None:
    """Remove the last of the replayed entries with this ``of_model``, and return it."""
    entry = recent.pop()
    if entry.of_model is of_model:
        return entry
    found = _take(recent, of_model) if recent else None
    recent.append(entry)
    return found


def watch(runner: Any, executions: Executions) -> None:
    """Hook one model runner.

    Raises:
        AttributeError: it does not have the methods that are watched.

    """
    if has_method(runner, "profile_cudagraph_memory"):
        _watch_profiling(runner, executions.graphs)
    _watch_steps(runner, executions)
    if has_method(runner, "_dummy_run"):
        _watch_dummies(runner, executions)
    _watch_dispatch(runner, executions)


def _watch_steps(runner: Any, executions: Executions) -> None:
    part = executions.graphs.executions

    def before(_: Any) -> bool:
        """Returns whether this call is the outermost one."""
        if executions.depth:
            return False
        executions.depth = 1
        try:
            executions.begin()
        except Exception as error:
            part.fail("execute_model", error)
        return True

    def after(is_outermost: bool, scheduler_output: Any) -> None:
        if is_outermost:
            executions.depth = 0
            try:
                executions.end(scheduler_output)
            except Exception as error:
                part.fail("execute_model", error)

    part.on_stop(
        hook(
            runner, "execute_model", "scheduler_output", before=before, lastly=after, given="place"
        )
    )


def _watch_dummies(runner: Any, executions: Executions) -> None:
    """A dummy run is an execution, or turns the one around it into a dummy."""
    part = executions.graphs.executions

    def before(num_tokens: Any) -> bool:
        """Returns whether this call is the outermost one."""
        is_outermost = not executions.depth
        try:
            executions.depth += 1
            if is_outermost:
                executions.begin()
            executions.dummy_tokens = int(num_tokens)
        except Exception as error:
            part.fail("_dummy_run", error)
        return is_outermost

    def after(is_outermost: bool, _: Any) -> None:
        executions.depth -= 1
        try:
            if is_outermost:
                executions.end(None)
        except Exception as error:
            part.fail("_dummy_run", error)

    part.on_stop(hook(runner, "_dummy_run", "num_tokens", before=before, lastly=after))


def _watch_profiling(runner: Any, graphs: Graphs) -> None:
    def before() -> None:
        graphs.profiling = True

    def after(_: None) -> None:
        graphs.profiling = False

    graphs.part.on_stop(hook(runner, "profile_cudagraph_memory", before=before, lastly=after))


def _watch_dispatch(runner: Any, executions: Executions) -> None:
    """Note what each execution is dispatched to, at the place that decides last.

    Data-parallel ranks agree on one mode after each has found its own. So where there is such a
    place, the dispatcher's answer may not be what runs. Releases before 0.10 have no dispatcher.
    """
    on_stop = executions.graphs.executions.on_stop
    for owner, name in (
        (runner, "_determine_batch_execution_and_padding"),
        (getattr(runner, "cudagraph_dispatcher", None), "dispatch"),
    ):
        if has_method(owner, name):
            executions.is_dispatched = True
            on_stop(hook(owner, name, after=executions.dispatched, given="name"))
            return
    module = sys.modules[type(runner).__module__]
    name = "dispatch_cg_and_sync_dp"
    function = getattr(module, name, None)
    if function is not None:
        executions.is_dispatched = True
        ours = _noted_function(function, executions)
        setattr(module, name, ours)
        on_stop(lambda: _put_back(module, name, ours, function))


def _noted_function(original: Callable[..., Any], executions: Executions) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        answer = executions.answer = original(*args, **kwargs)
        return answer

    return call


def _put_back(module: Any, name: str, ours: Any, original: Any) -> None:
    if getattr(module, name, None) is ours:
        setattr(module, name, original)
