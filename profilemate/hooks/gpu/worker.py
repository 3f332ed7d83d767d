# SPDX-License-Identifier: Apache-2.0
"""Waits for the module of vLLM's workers, and watches each as soon as it has its device."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import wrapt

from profilemate import config
from profilemate.format.errors import SessionError
from profilemate.hooks import targets
from profilemate.hooks.gpu import executions, experts, graphs, phases, worker_facts
from profilemate.hooks.gpu.experts import Counted
from profilemate.hooks.gpu.gpu_timer import GpuTimer
from profilemate.hooks.instances import has_method, hook, reference
from profilemate.hooks.kv.deployment import deployment_of
from profilemate.hooks.producers import open_journal
from profilemate.messages import cause, give_up, say
from profilemate.record import launch
from profilemate.record.recorder import WORKER_PAUSE_SEC, Recorder


def attach(module: Any) -> None:
    """Watch each worker, whatever its class.

    In some releases the wrapper around workers is in another module, which may import it, too.
    """
    wrapper = vars(module).get("WorkerWrapperBase")
    if wrapper is not None and wrapper.__module__ == module.__name__:
        wrapt.wrap_function_wrapper(wrapper, "init_worker", _after_init_worker)


def _after_init_worker(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    worker = instance.worker
    if not has_method(worker, "init_device"):
        return
    this = reference(worker)

    def after(_: Any) -> None:
        undo()
        watch(this())

    undo = hook(worker, "init_device", after=after)


def watch(worker: Any) -> None:
    """Begin to record what this worker does on its GPU. Never raises; says why it cannot.

    Of a worker on another device nothing is recorded but its experts, where they are asked for.
    """
    try:
        settings = config.read(os.environ)
        device = getattr(getattr(worker, "device", None), "type", None)
        is_watched = device == "cuda" or (device and _counts_experts(worker, settings))
        if settings.enabled and is_watched:
            _watch(worker, settings)
    except SessionError as error:
        give_up(str(error))
    except Exception as error:
        version = getattr(sys.modules.get("vllm"), "__version__", "of unknown version")
        say(
            f"CUDA graphs and GPU memory are not recorded: this vLLM ({version}) has workers that "
            f"profilemate does not know ({cause(error)}); the KV cache is recorded"
        )


def _counts_experts(worker: Any, settings: config.Config) -> bool:
    return settings.experts and experts.counts_here(worker.vllm_config, int(worker.rank))


def _watch(worker: Any, settings: config.Config) -> None:
    described = worker_facts.describe(worker)
    header = {
        "gpu_interval_sec": settings.gpu_interval_sec,
        "gpu_timing": settings.gpu_timing,
        "deployment": deployment_of(settings, worker.vllm_config),
        "phases": settings.phases,
        **described,
    }
    opened = open_journal(settings, "worker", described["rank"], header, WORKER_PAUSE_SEC)
    if opened is None:
        return
    place, recorder = opened
    counted = Counted()
    timed = None
    try:
        recorded = _attach(worker, settings, described, recorder)
        if settings.phases and worker.device.type == "cuda":
            timed = phases.watch(worker, recorded, sys.modules["torch"].cuda)
        if _counts_experts(worker, settings):
            experts.watch(worker, recorded, settings.expert_pairs, counted)
    except Exception as error:
        recorder.fail("attaching", error)
        recorder.close()
        return
    weakref.finalize(worker, _close, recorded, counted, timed)
    launch.start(place.directory)
    if settings.verbose:
        say(f"worker {described['rank']} records into {place.directory}")


def _attach(
    worker: Any, settings: config.Config, described: dict[str, Any], recorder: Recorder
) -> graphs.Graphs:
    """Put the hooks in place.

    Raises:
        Exception: nothing can be recorded of this worker.

    """
    cuda = sys.modules["torch"].cuda
    is_timed = settings.gpu_timing and worker.device.type == "cuda"
    recorded = graphs.Graphs(recorder, GpuTimer(cuda) if is_timed else None)
    if worker.device.type != "cuda":
        return recorded
    recorded_executions = executions.Executions(recorded)
    with recorded.part.attaching():
        graphs.watch(recorded, cuda.CUDAGraph)
    if not recorded.part.lost:
        with recorded.executions.attaching():
            executions.watch(worker.model_runner, recorded_executions)
    _watch_start_up(worker, recorded_executions, recorder)
    is_v2 = described["cuda_graphs"]["runner"] == "V2"
    owners = {
        targets.WORKER: [worker],
        targets.RUNNER_V2 if is_v2 else targets.RUNNER: [worker.model_runner],
    }
    recorder.status(
        methods=targets.attached_and_missing(owners, described["versions"]["vllm"] or "")
    )
    return recorded


def _close(recorded: graphs.Graphs, counted: Counted, timed: phases.Phases | None) -> None:
    if recorded.recorder.active:
        counted.close()
    if recorded.recorder.active and timed is not None and not timed.part.lost:
        try:
            timed.close()
        except Exception as error:
            timed.part.fail("the worker's end", error)
    try:
        if recorded.recorder.active:
            recorded.close()
    except Exception as error:
        recorded.recorder.fail("the worker's end", error)
    recorded.recorder.close()


def _watch_start_up(worker: Any, recorded: executions.Executions, recorder: Recorder) -> None:
    """Record what the worker finds while it starts."""
    facts = worker_facts.StartUp()
    runner, this = worker.model_runner, reference(worker)

    def record_memory() -> None:
        recorder.status(memory=facts.memory(this()))

    _after(worker, "determine_available_memory", lambda *_: record_memory(), recorder)
    _after(worker, "initialize_from_config", facts.take_kv_cache, recorder, "kv_cache_config")
    _after(runner, "capture_model", facts.take_capture, recorder)

    _watch_warm_up(worker, recorded, recorder, record_memory)


def _watch_warm_up(
    worker: Any,
    recorded: executions.Executions,
    recorder: Recorder,
    record_memory: Callable[[], None],
) -> None:
    name = "compile_or_warm_up_model"
    if not has_method(worker, name):
        return
    this = reference(worker)

    def before() -> None:
        recorded.warming_up = True

    def after(_: None) -> None:
        recorded.warming_up = False
        try:
            record_memory()
            recorder.status(cuda_graphs=worker_facts.resolved_graphs(this()))
        except Exception as error:
            _lose_numbers(recorder, name, error)

    recorder.on_stop(hook(worker, name, before=before, lastly=after))


def _after(
    instance: Any, name: str, run: Callable[..., None], recorder: Recorder, *arguments: str
) -> None:
    """Call ``run(result, *arguments)`` after each call of the instance's method, if it has it."""
    if not has_method(instance, name):
        return

    def after(*given: Any) -> None:
        try:
            run(*given)
        except Exception as error:
            _lose_numbers(recorder, name, error)

    recorder.on_stop(hook(instance, name, *arguments, after=after))


def _lose_numbers(recorder: Recorder, name: str, error: Exception) -> None:
    """The numbers of the start-up are lost; executions are recorded all the same."""
    recorder.status(failed={name: cause(error)})
