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
from profilemate.hooks.gpu import executions, graphs, worker_facts
from profilemate.hooks.gpu.gpu_timer import GpuTimer
from profilemate.hooks.instances import own_method, put, reference, required_method
from profilemate.hooks.producers import open_journal
from profilemate.messages import give_up, reason_of, say
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
    original, this = own_method(worker, "init_device"), reference(worker)
    if original is None:
        return

    def init_device(*args: Any, **kwargs: Any) -> Any:
        undo()
        result = original(this(), *args, **kwargs)
        watch(this())
        return result

    undo = put(worker, "init_device", init_device)


def watch(worker: Any) -> None:
    """Begin to record what this worker does on its GPU. Never raises; says why it cannot.

    Of a worker on another device nothing is recorded.
    """
    try:
        settings = config.read(os.environ)
        device = getattr(worker, "device", None)
        if settings.enabled and getattr(device, "type", None) == "cuda":
            _watch(worker, settings)
    except SessionError as error:
        give_up(str(error))
    except Exception as error:
        version = getattr(sys.modules.get("vllm"), "__version__", "of unknown version")
        say(
            f"CUDA graphs and GPU memory are not recorded: this vLLM ({version}) has workers that "
            f"profilemate does not know ({reason_of(error)}); the KV cache is recorded"
        )


def _watch(worker: Any, settings: config.Config) -> None:
    described = worker_facts.describe(worker)
    header = {
        "gpu_interval_sec": settings.gpu_interval_sec,
        "gpu_timing": settings.gpu_timing,
        **described,
    }
    opened = open_journal(settings, "worker", described["rank"], header, WORKER_PAUSE_SEC)
    if opened is None:
        return
    place, recorder = opened
    try:
        recorded = _attach(worker, settings, described, recorder)
    except Exception as error:
        recorder.fail("attaching", error)
        recorder.close()
        return
    weakref.finalize(worker, _close, recorded)
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
    recorded = graphs.Graphs(recorder, GpuTimer(cuda) if settings.gpu_timing else None)
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


def _close(recorded: graphs.Graphs) -> None:
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
    _after(worker, "initialize_from_config", facts.take_kv_cache, recorder)
    _after(runner, "capture_model", facts.take_capture, recorder)

    _watch_warm_up(worker, recorded, recorder, record_memory)


def _watch_warm_up(
    worker: Any,
    recorded: executions.Executions,
    recorder: Recorder,
    record_memory: Callable[[], None],
) -> None:
    name = "compile_or_warm_up_model"
    if own_method(worker, name) is None:
        return
    original, this = required_method(worker, name), reference(worker)

    def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
        recorded.warming_up = True
        try:
            return original(this(), *args, **kwargs)
        finally:
            recorded.warming_up = False
            try:
                record_memory()
                recorder.status(cuda_graphs=worker_facts.resolved_graphs(this()))
            except Exception as error:
                _lose_numbers(recorder, name, error)

    recorder.on_stop(put(worker, name, compile_or_warm_up_model))


def _after(instance: Any, name: str, run: Callable[..., None], recorder: Recorder) -> None:
    """Call ``run(result, *arguments)`` after each call of the instance's method, if it has it."""
    if own_method(instance, name) is None:
        return
    original, this = required_method(instance, name), reference(instance)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(this(), *args, **kwargs)
        try:
            run(result, *args)
        except Exception as error:
            _lose_numbers(recorder, name, error)
        return result

    recorder.on_stop(put(instance, name, call))


def _lose_numbers(recorder: Recorder, name: str, error: Exception) -> None:
    """The numbers of the start-up are lost; executions are recorded all the same."""
    recorder.status(failed={name: reason_of(error)})
