# SPDX-License-Identifier: Apache-2.0
"""Counts kept inside a worker's process by an extension of the user's, not by profilemate.

All of it sits below what profilemate replaces: CUDA graphs are counted in torch's C++ class under
``torch.cuda.CUDAGraph``, executions and dispatches in the classes and modules of vLLM, blocks in
its BlockPool. vLLM imports this module where the worker is made: give the engine
``worker_extension_cls="independent.Extension"``, and read it with
``collective_rpc("independent_counts")``.

PROFILEMATE_CUDA_COUNTERS may name a module of a stand-in for CUDA: its ``counts()`` are read along,
and its ``tame_sampling()`` is called.
"""

import functools
import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from counting import count
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.counter import compilation_counter
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker import gpu_model_runner as v1
from vllm.v1.worker.gpu import model_runner as v2
from vllm.v1.worker.gpu_worker import Worker

PROFILING, CAPTURING, WARMING_UP = "profiling", "capture", "warm-up"
SERVING = "serving"

MEMORY = (
    "requested_memory",
    "peak_activation_memory",
    "non_torch_memory",
    "total_consumed",
    "cudagraph_memory_estimate",
    "available_kv_cache_memory_bytes",
)
"""What a worker keeps of what it found when it started, as far as its release does."""


@dataclass
class Seen:
    """What happened in this process.

    ``captures`` and ``replays`` count CUDA graphs by what vLLM was about; ``breakable`` counts
    the batches that were captured in a breakable graph. ``executions`` has, for each execution
    that served requests, its mode, padded tokens, unpadded tokens and the graphs replayed in it;
    ``dummies`` counts the others. ``dispatched`` has mode, padded and unpadded tokens as vLLM's own
    statistics had them.
    """

    captures: Counter[str] = field(default_factory=Counter)
    replays: Counter[str] = field(default_factory=Counter)
    breakable: int = 0
    executions: list[tuple[str, int, int, int]] = field(default_factory=list)
    dummies: int = 0
    dispatched: list[tuple[str, int, int]] = field(default_factory=list)
    graphs_bytes: int | None = None
    kv_allocated_bytes: int | None = None
    blocks: int | None = None


seen = Seen()
_about: list[str] = []
_depth = 0
_dispatched: tuple[str, int] | None = None


def _now_about() -> str:
    return PROFILING if PROFILING in _about else (_about or [SERVING])[-1]


@contextmanager
def _being_about(what: str) -> Iterator[None]:
    _about.append(what)
    try:
        yield
    finally:
        _about.pop()


def _around(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Have ``around(original, *args, **kwargs)`` called in the place of a method or function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, call)


def _within(owner: Any, name: str, what: str) -> None:
    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        with _being_about(what):
            return original(*args, **kwargs)

    _around(owner, name, around)


def _capture_begin(original: Any, *args: Any, **kwargs: Any) -> Any:
    original(*args, **kwargs)
    seen.captures[_now_about()] += 1


def _replay(original: Any, graph: Any) -> Any:
    seen.replays[_now_about()] += 1
    return original(graph)


def _breakable(original: Any, *args: Any, **kwargs: Any) -> Any:
    seen.breakable += 1
    return original(*args, **kwargs)


def _execute_model(original: Any, runner: Any, scheduler_output: Any, *args: Any, **kw: Any) -> Any:
    global _depth, _dispatched
    tokens = scheduler_output.total_num_scheduled_tokens
    if _depth or not tokens:
        return original(runner, scheduler_output, *args, **kw)
    _depth, _dispatched, before = 1, None, seen.replays.total()
    try:
        return original(runner, scheduler_output, *args, **kw)
    finally:
        _depth = 0
        if _about:
            seen.dummies += 1
        elif _dispatched is not None:
            mode, padded = _dispatched
            seen.executions.append((mode, padded, tokens, seen.replays.total() - before))


def _dummy_run(original: Any, *args: Any, **kwargs: Any) -> Any:
    global _depth
    if not _depth:
        seen.dummies += 1
    _depth += 1
    try:
        return original(*args, **kwargs)
    finally:
        _depth -= 1


def _dispatch_v1(original: Any, *args: Any, **kwargs: Any) -> Any:
    global _dispatched
    answer = original(*args, **kwargs)
    _dispatched = answer[0].name, answer[1].num_tokens
    return answer


def _dispatch_v2(original: Any, *args: Any, **kwargs: Any) -> Any:
    global _dispatched
    answer = original(*args, **kwargs)
    _dispatched = answer[0].cg_mode.name, answer[0].num_tokens
    return answer


def _capture_model(original: Any, *args: Any, **kwargs: Any) -> Any:
    with _being_about(CAPTURING):
        taken = original(*args, **kwargs)
    if PROFILING not in _about:
        seen.graphs_bytes = taken
    return taken


def _initialize(original: Any, worker: Any, kv_cache_config: Any) -> Any:
    seen.blocks = kv_cache_config.num_blocks
    seen.kv_allocated_bytes = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
    return original(worker, kv_cache_config)


def _update(original: Any, scheduler: Any, scheduler_output: Any, output: Any) -> Any:
    stat = output.cudagraph_stats
    if stat is not None:
        mode = stat.runtime_mode.rpartition(".")[2]
        seen.dispatched.append((mode, stat.num_padded_tokens, stat.num_unpadded_tokens))
    return original(scheduler, scheduler_output, output)


_around(torch._C._CUDAGraph, "capture_begin", _capture_begin)
_around(torch._C._CUDAGraph, "replay", _replay)
_around(BreakableCUDAGraphWrapper, "_capture", _breakable)
_around(v1.GPUModelRunner, "_determine_batch_execution_and_padding", _dispatch_v1)
_around(v2, "dispatch_cg_and_sync_dp", _dispatch_v2)
for _runner in (v1.GPUModelRunner, v2.GPUModelRunner):
    _around(_runner, "execute_model", _execute_model)
    _around(_runner, "_dummy_run", _dummy_run)
    _around(_runner, "capture_model", _capture_model)
    _within(_runner, "profile_cudagraph_memory", PROFILING)
_within(Worker, "determine_available_memory", WARMING_UP)
_within(Worker, "compile_or_warm_up_model", WARMING_UP)
_around(Worker, "initialize_from_config", _initialize)
_around(Scheduler, "update_from_output", _update)

_blocks = count()
_stand_in = (
    importlib.import_module(os.environ["PROFILEMATE_CUDA_COUNTERS"])
    if os.environ.get("PROFILEMATE_CUDA_COUNTERS")
    else None
)
if _stand_in is not None:
    _stand_in.tame_sampling()


class Extension:
    """What vLLM adds to its worker's class."""

    def independent_counts(self: Any) -> dict[str, Any]:
        """All that was seen until now."""
        runner = self.model_runner
        memory = {name: int(getattr(self, name)) for name in MEMORY if hasattr(self, name)}
        return {
            "runner": "V2" if isinstance(runner, v2.GPUModelRunner) else "V1",
            "pid": os.getpid(),
            "captures": dict(seen.captures),
            "captured_by_vllm": compilation_counter.num_cudagraph_captured,
            "breakable": seen.breakable,
            "replays": dict(seen.replays),
            "executions": list(seen.executions),
            "dummies": seen.dummies,
            "dispatched": list(seen.dispatched),
            "blocks": _blocks.result(),
            "stand_in": _stand_in.counts() if _stand_in is not None else {},
            "memory": {
                **memory,
                "total_memory": int(self.init_snapshot.total_memory),
                "model_memory_usage": int(runner.model_memory_usage),
                "graphs_bytes": seen.graphs_bytes,
                "kv_allocated_bytes": seen.kv_allocated_bytes,
                "num_blocks": seen.blocks,
            },
            "backends": sorted(
                {group.backend.get_name() for groups in runner.attn_groups for group in groups}
            ),
        }
