# SPDX-License-Identifier: Apache-2.0
"""Record how long each step takes on the GPU, and what it computes: prompts, answers or both.

CUDA events before and after ``execute_model`` and ``sample_tokens``, and around the encoder of a
multimodal model; they are read when they have passed, and nothing waits for the GPU.
"""

from __future__ import annotations

import time
from typing import Any

from profilemate.format.events import More, Op
from profilemate.hooks.gpu import serving
from profilemate.hooks.gpu.gpu_timer import NOT_MEASURED, GpuTimer, Interval
from profilemate.hooks.gpu.graphs import Graphs
from profilemate.hooks.gpu.step_tokens import Prefills, StepTokens
from profilemate.hooks.instances import has_method, hook, reference
from profilemate.hooks.parts import Part
from profilemate.record import encode

_now = time.monotonic_ns


class _Step:
    """A step under way. ``items``: what it gives to the encoder. ``is_whole``: all that it did on
    the GPU so far was timed. ``ended_ns``: when ``execute_model`` had launched it."""

    def __init__(self, tokens: StepTokens, items: int) -> None:
        self.tokens = tokens
        self.items = items
        self.model: list[Interval] = []
        self.encoder: list[Interval] = []
        self.is_whole = True
        self.gpu_ns = NOT_MEASURED
        self.ended_ns = 0


class Phases:
    """Records the steps of one worker, in the journal of its ``graphs``."""

    def __init__(self, graphs: Graphs, timer: GpuTimer, prefills: Prefills) -> None:
        self.part = Part(graphs.recorder, "phases")
        self._graphs = graphs
        self._recorder = graphs.recorder
        self._timer = timer
        self._prefills = prefills
        self._step: _Step | None = None
        self._under_way: Interval | None = None

    def begins(self, scheduler_output: Any) -> None:
        """``execute_model`` is about to run for requests."""
        self._finish()
        tokens = self._prefills.of(scheduler_output)
        encoded = getattr(scheduler_output, "scheduled_encoder_inputs", None) or {}
        step = self._step = _Step(tokens, sum(map(len, encoded.values())))
        self._under_way = self._begin(step)

    def ended(self, _: Any, result: Any) -> None:
        """``execute_model`` has returned. Where that was nothing, sampling may follow."""
        self._end()
        step = self._step
        if step is not None:
            step.ended_ns = _now()
            if result is not None:
                self._finish()

    def dropped(self) -> None:
        """What ran was no step, or failed."""
        self._end()
        step, self._step = self._step, None
        if step is not None:
            self._timer.when_done([*step.model, *step.encoder], lambda _: None)

    def samples(self) -> None:
        """``sample_tokens`` is about to run."""
        if self._step is not None:
            self._under_way = self._begin(self._step)

    def sampled(self, _: None) -> None:
        """``sample_tokens`` has returned, or failed."""
        self._end()
        self._finish()

    def encodes(self) -> Interval | None:
        """The encoder is about to run."""
        step = self._step
        if step is None or not step.items:
            return None
        return self._timer.begin()

    def encoded(self, interval: Interval | None) -> None:
        """The encoder has run, or failed."""
        if interval is not None:
            interval[1].record()
            if self._step is not None:
                self._step.encoder.append(interval)

    def close(self) -> None:
        """Nothing more runs: record what is left."""
        self._finish()
        self._timer.give_up()

    def _begin(self, step: _Step) -> Interval | None:
        interval = self._timer.begin()
        if interval is None:
            step.is_whole = False
        return interval

    def _end(self) -> None:
        interval, self._under_way = self._under_way, None
        if interval is not None and self._step is not None:
            interval[1].record()
            self._step.model.append(interval)

    def _finish(self) -> None:
        """Record the step under way, if there is one."""
        step, self._step = self._step, None
        if step is None:
            return
        recorder = self._recorder
        is_paused = recorder.wants_pause or recorder.is_paused
        if is_paused:
            self._timer.give_up()
            self._graphs.is_paused()
            self._timer.when_done([*step.model, *step.encoder], lambda _: None)
            return
        if not (step.tokens.prefill_tokens or step.tokens.decode_tokens):
            self._timer.when_done([*step.model, *step.encoder], lambda _: None)
            return
        keep = recorder.keep

        def note(gpu_ns: int) -> None:
            step.gpu_ns = gpu_ns if step.is_whole else NOT_MEASURED

        def record(encoder_ns: int) -> None:
            if not step.encoder:
                encoder_ns = NOT_MEASURED if step.items else 0
            values = [*step.tokens, _known(step.gpu_ns), step.items, _known(encoder_ns)]
            keep((encode.more, Op.MORE, step.ended_ns, More.PHASES, values))

        # Reported in this order.
        self._timer.when_done(step.model, note)
        self._timer.when_done(step.encoder, record)
        recorder.step_ended()


def _known(nanoseconds: int) -> int | None:
    return None if nanoseconds == NOT_MEASURED else nanoseconds


def watch(worker: Any, graphs: Graphs, cuda: Any) -> Phases:
    """Record the steps of this worker, which has its device.

    Args:
        worker: vLLM's, on a GPU.
        graphs: with the worker's recorder.
        cuda: ``torch.cuda``.

    """
    runner = worker.model_runner
    this = reference(runner)
    prefills = Prefills(lambda request_id: int(this().requests[request_id].num_tokens))
    recorded = Phases(graphs, GpuTimer(cuda), prefills)
    part = recorded.part
    with part.attaching():
        serving.watch(
            worker,
            runner,
            part,
            recorded.ended,
            begins=recorded.begins,
            dropped=recorded.dropped,
        )
        if has_method(runner, "sample_tokens"):
            _watch_call(runner, "sample_tokens", part, recorded.samples, recorded.sampled)
        _watch_encoder(worker, recorded)
    return recorded


def _watch_encoder(worker: Any, recorded: Phases) -> None:
    """Model runner V1 has a method of its own for the encoder. That of V2 has an object for it,
    once it has its model."""
    part, this = recorded.part, reference(worker)
    name = "_execute_mm_encoder"
    if has_method(worker.model_runner, name):
        _watch_call(worker.model_runner, name, part, recorded.encodes, recorded.encoded)
    elif has_method(worker, "load_model"):

        def loaded(_: Any) -> None:
            undo()
            with part.attaching():
                state = getattr(this().model_runner, "model_state", None)
                encoder = getattr(state, "encoder_runner", None)
                name = "execute_mm_encoder"
                if has_method(encoder, name) and not part.lost:
                    _watch_call(encoder, name, part, recorded.encodes, recorded.encoded)

        undo = hook(worker, "load_model", after=loaded)
        part.on_stop(undo)


def _watch_call(owner: Any, name: str, part: Part, begins: Any, ended: Any) -> None:
    """Call ``begins()``, and ``ended`` with what it returned, around each call of the method."""

    def before() -> Any:
        try:
            return begins()
        except Exception as error:
            part.fail(name, error)
            return None

    def after(begun: Any) -> None:
        try:
            ended(begun)
        except Exception as error:
            part.fail(name, error)

    part.on_stop(hook(owner, name, before=before, lastly=after))
