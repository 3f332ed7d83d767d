# SPDX-License-Identifier: Apache-2.0
"""Record what happens to CUDA graphs, at torch's own class, in which all of vLLM's ways end.

``torch.cuda.CUDAGraph`` is changed once a process, as long as a worker in it is recorded. A graph
gets its entry when it is captured, so that a replay has only to count.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from typing import Any

import orjson

from profilemate.format.events import Op
from profilemate.hooks import calls
from profilemate.hooks.gpu import graph_sources
from profilemate.hooks.gpu.gpu_timer import GpuTimer, Interval
from profilemate.hooks.gpu.graph_sources import Batch, Capture
from profilemate.hooks.parts import Part
from profilemate.record import encode
from profilemate.record.recorder import Recorder

_now = time.monotonic_ns

MAX_NS = (1 << 32) - 2
"""The longest time that a number of the journal can hold: 4.3 s."""


class Entry:
    """CUDA graphs that belong together, and their replays that are not recorded yet.

    ``number`` is 0 for graphs whose capture was not seen. ``of_model`` says whether they are the
    model's own, not a drafter's or an encoder's; None where that is not known. ``graphs`` counts
    the replays, ``launch_ns`` is the time that they took the host, ``intervals`` are theirs on the
    GPU.
    """

    __slots__ = ("graphs", "intervals", "launch_ns", "number", "of_model", "recent")

    def __init__(self, number: int, recent: list[Entry], of_model: bool | None = None) -> None:
        self.number = number
        self.of_model = of_model
        self.recent = recent
        self.graphs = 0
        self.launch_ns = 0
        self.intervals: list[Interval] = []

    def take(self) -> tuple[int, int, int]:
        """Number, graphs and time of the replays, which are counted anew from here on."""
        graphs, launch_ns = self.graphs, self.launch_ns
        self.graphs = self.launch_ns = 0
        if launch_ns > MAX_NS:
            launch_ns = MAX_NS
        return self.number, graphs, launch_ns


_OF_MODEL = {"model": True, "unknown": None}
"""By part: whether its graphs are the model's."""

_NOTHING = 0, 0, 0
"""What stands for an entry where none was replayed."""

_NO_BATCH = (None,) * len(Batch._fields)


class Graphs:
    """The CUDA graphs of one worker.

    ``recent`` lists the entries with replays that are not recorded yet. ``captured`` is the batch
    for which a graph of the model was last captured. ``profiling`` is set while vLLM captures
    samples that it throws away. ``part`` is the graphs' part of the recording, and ``executions``
    that of the executions around replays.
    """

    def __init__(self, recorder: Recorder, timer: GpuTimer | None) -> None:
        self.profiling = False
        self.captured: Batch | None = None
        self.timer = timer
        self.recent: list[Entry] = []
        self.unknown = Entry(0, self.recent)
        self.recorder = recorder
        self.graph_class: Any = None
        self.executions = Part(recorder, "executions", on_loss=lambda: _record_each_replay(self))
        self.part = Part(recorder, "graphs", self.executions)
        self._entries = 0
        self._last: tuple[Entry, Capture, bool] | None = None

    def begin(self, graph: Any) -> None:
        """This graph is about to be captured."""
        entry = self._entry(graph_sources.current())
        graph._profilemate_entry = entry
        graph._profilemate_capture = _free_bytes(), _now()

    def end(self, graph: Any) -> None:
        """The graph has been captured."""
        ended = _now()
        free_before, began = graph._profilemate_capture
        del graph._profilemate_capture
        free = _free_bytes()
        known = free is not None and free_before is not None
        taken_kib = max(0, free_before - free) >> 10 if known else -1
        numbers = graph._profilemate_entry.number, taken_kib + 1
        self.recorder.keep((encode.between, Op.CAPTURE, began, ended, numbers))
        if self._last is not None and self._last[1].part == "model":
            self.captured = self._last[1].batch
        self.recorder.step_ended()

    def is_paused(self) -> bool:
        """Whether nothing is to be recorded now, as the user wants it; what was replayed since the
        last call is forgotten then. Called where an execution has ended."""
        recorder = self.recorder
        if not (recorder.wants_pause or recorder.is_paused):
            return False
        if recorder.wants_pause != recorder.is_paused:
            self._turn(paused=recorder.wants_pause)
        self._forget_recent()
        # The execution in which it goes on has begun before.
        return True

    def _turn(self, *, paused: bool) -> None:
        recorder = self.recorder
        if paused:
            if self.timer is not None:
                self.timer.give_up()
            recorder.keep((encode.once, Op.PAUSE, _now(), ()))
        else:
            recorder.keep((encode.resumed, Op.RESUME, _now(), 0, 0, (), None, None))
        recorder.is_paused = paused
        recorder.step_ended()

    def _forget_recent(self) -> None:
        for entry in self.recent:
            entry.take()
            if self.timer is not None:
                intervals, entry.intervals = entry.intervals, []
                self.timer.when_done(intervals, lambda _: None)
        self.recent.clear()

    def record_recent(self) -> None:
        """Record the replays that belong to no execution."""
        if self.recorder.is_paused:
            self._forget_recent()
            return
        now = _now()
        for entry in self.recent:
            if self.timer is None:
                self.recorder.keep((encode.once, Op.REPLAY, now, (*entry.take(), 0)))
            else:
                self._record_timed(self.timer, Op.REPLAY, now, entry, (), ())
        self.recent.clear()

    def record_execution(
        self, now: int, entry: Entry | None, batch: int, tokens: int, dummy: bool
    ) -> None:
        """Record an execution that ended now, with this entry's replays."""
        if self.timer is not None:
            self._record_timed(self.timer, Op.EXECUTION, now, entry, (batch, tokens), (dummy,))
            return
        replays = entry.take() if entry is not None else _NOTHING
        numbers = batch, tokens, *replays, 0, dummy
        self.recorder.keep((encode.once, Op.EXECUTION, now, numbers))

    def _record_timed(
        self,
        timer: GpuTimer,
        op: Op,
        now: int,
        entry: Entry | None,
        before: tuple[int, ...],
        after: tuple[int, ...],
    ) -> None:
        replays = _NOTHING
        intervals: list[Interval] = []
        if entry is not None:
            intervals, entry.intervals = entry.intervals, []
            replays = entry.take()
        is_timed = 0 < len(intervals) == replays[1]
        keep = self.recorder.keep

        def record(gpu_ns: int) -> None:
            measured = min(gpu_ns + 1, MAX_NS) if is_timed else 0
            keep((encode.once, op, now, (*before, *replays, measured, *after)))

        timer.when_done(intervals, record)

    def close(self) -> None:
        """Nothing more is replayed: record what is left."""
        self.record_recent()
        if self.timer is not None:
            self.timer.give_up()

    def _entry(self, capture: Capture) -> Entry:
        if self._last is not None:
            entry, last, profiling = self._last
            # The wholes are compared by identity: a context's tensors have no equality.
            is_same = (last[:3], profiling) == (capture[:3], self.profiling)
            if is_same and _is_whole(last, capture):
                return entry
        self._entries += 1
        entry = Entry(self._entries, self.recent, _OF_MODEL.get(capture.part, False))
        self._last = entry, capture, self.profiling
        kind = "profiling" if self.profiling else "capture"
        values = [*(capture.batch or _NO_BATCH), capture.source, kind, capture.part]
        self.recorder.keep((encode.blob, Op.GRAPH, _now(), entry.number, orjson.dumps(values)))
        return entry


def _is_whole(last: Capture, capture: Capture) -> bool:
    """Whether two captures of one batch are pieces of one whole that is still there."""
    whole = capture.whole and capture.whole()
    return whole is not None and last.whole is not None and last.whole() is whole


def _free_bytes() -> int | None:
    """Free device memory in bytes, as the driver says. Never asked for during a capture."""
    try:
        return int(sys.modules["torch"].cuda.mem_get_info()[0])
    except Exception:
        return None


_watching: list[Graphs] = []
"""The graphs of this process's workers; the last of these takes new captures."""


def watch(graphs: Graphs, graph_class: Any) -> None:
    """Record all captures and replays of this class, torch.cuda.CUDAGraph, into ``graphs``.

    Raises:
        AttributeError: the class does not have the methods that are watched.

    """
    if _watching:
        # CUDA events go back to the timer that made them.
        graphs.timer = _watching[0].timer
    else:
        _hooked.update(_hook(graph_class, graphs.timer))
    graphs.graph_class = graph_class
    _watching.append(graphs)

    def undo() -> None:
        _watching.remove(graphs)
        if not _watching:
            for (owner, name), (ours, original) in list(_hooked.items()):
                # One that another tool has wrapped stays, idle, and serves the next worker.
                if getattr(owner, name) is ours:
                    setattr(owner, name, original)
                    del _hooked[owner, name]

    graphs.part.on_stop(undo)


Method = Callable[..., Any]
Name = tuple[type, str]
"""A class, and the name of its method."""

_hooked: dict[Name, tuple[Method, Any]] = {}
"""Our method of the class, and its own."""


def _hook(graph_class: Any, timer: GpuTimer | None) -> dict[Name, tuple[Method, Any]]:
    def hook_of_replay(original: Method) -> Method:
        return _replay(original) if timer is None else _timed_replay(original, timer)

    hooks = {"capture_begin": _begin, "capture_end": _end, "replay": hook_of_replay}
    originals = {name: calls.of_class(graph_class, name) for name in hooks}
    return {
        (graph_class, name): _put(graph_class, name, hook(originals[name]))
        for name, hook in hooks.items()
        if (graph_class, name) not in _hooked
    }


def _put(graph_class: Any, name: str, ours: Method) -> tuple[Method, Any]:
    """Put a method of ours on the class; returns it and what was there."""
    original = inspect.getattr_static(graph_class, name)
    ours.__name__ = name
    ours.__qualname__ = getattr(original, "__qualname__", name)
    ours.__doc__ = original.__doc__
    ours.__wrapped__ = original  # type: ignore[attr-defined]
    setattr(graph_class, name, ours)
    return ours, original


def _begin(original: Method) -> Method:
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        graphs = _watching[-1] if _watching else None
        if graphs is not None:
            try:
                graphs.begin(graph)
            except Exception as error:
                graphs.part.fail("capture_begin", error)
        return original(graph, *args, **kwargs)

    return capture_begin


def _end(original: Method) -> Method:
    def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(graph, *args, **kwargs)
        graphs = _watching[-1] if _watching else None
        if graphs is not None and hasattr(graph, "_profilemate_capture"):
            try:
                graphs.end(graph)
            except Exception as error:
                graphs.part.fail("capture_end", error)
        return result

    return capture_end


def _replay(original: Method) -> Method:
    if len(inspect.signature(original, follow_wrapped=False).parameters) != 1:
        # Another tool's, or one that takes more than the graph.
        return lambda graph, *args, **kwargs: _counted(
            lambda graph: original(graph, *args, **kwargs)
        )(graph)
    return _counted(original)


def _counted(original: Method) -> Method:
    now = time.monotonic_ns

    def replay(graph: Any) -> Any:
        began = now()
        result = original(graph)
        try:
            took = now() - began
            try:
                entry = graph._profilemate_entry
            except AttributeError:
                entry = _adopt(graph)
            if not entry.graphs:
                entry.recent.append(entry)
            entry.graphs += 1
            entry.launch_ns += took
        except Exception as error:
            _fail("replay", error)
        return result

    return replay


def _timed_replay(original: Method, timer: GpuTimer) -> Method:
    counted = _replay(original)

    def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
        interval = None
        try:
            interval = timer.begin()
        except Exception as error:
            _fail("GPU timing", error)
        result = counted(graph, *args, **kwargs)
        if interval is not None:
            try:
                interval[1].record()
                graph._profilemate_entry.intervals.append(interval)
            except Exception as error:
                _fail("GPU timing", error)
        return result

    return replay


def _adopt(graph: Any) -> Entry:
    """The entry of a graph that was captured before any worker was watched."""
    entry = _watching[-1].unknown if _watching else Entry(0, [])
    graph._profilemate_entry = entry
    return entry


def _fail(where: str, error: Exception) -> None:
    for graphs in _watching.copy():
        graphs.part.fail(where, error)


def _record_each_replay(graphs: Graphs) -> None:
    """Record each replay at once: no execution's end is seen any more."""
    if graphs not in _watching:
        return
    key = graphs.graph_class, "replay"
    ours, original = _hooked[key]

    def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
        result = ours(graph, *args, **kwargs)
        try:
            for watching in _watching:
                if watching.is_paused():
                    continue
                watching.record_recent()
                watching.recorder.step_ended()
        except Exception as error:
            _fail("replay", error)
        return result

    _put(graphs.graph_class, "replay", replay)
    _hooked[key] = replay, original
