# SPDX-License-Identifier: Apache-2.0
"""Which part of vLLM captures a CUDA graph, and for which batch.

Every way to capture ends in ``torch.cuda.CUDAGraph``, which knows nothing of batches. The stack
says, once a capture, who called it. The parts of vLLM that capture are called for every piece of
every execution and replay there, too, so a wrapper around them would slow each replay.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple


class Batch(NamedTuple):
    """A batch descriptor, as far as all releases have it.

    ``mode`` is ``FULL``, ``PIECEWISE`` or ``NONE``; ``num_reqs`` is None where the graph takes any
    number of requests.
    """

    mode: str
    num_tokens: int
    num_reqs: int | None
    uniform: int
    has_lora: int


class Capture(NamedTuple):
    """A capture: for which batch, by which class of vLLM, for which model.

    ``part`` is ``model``, ``drafter`` or ``encoder``. Graphs with the same ``whole`` belong
    together; None where each is complete by itself. ``batch`` is None where it is not known.
    """

    batch: Batch | None
    source: str
    part: str
    whole: weakref.ref[Any] | None


_DRAFTERS = ("vllm.v1.spec_decode", "vllm.v1.worker.gpu.spec_decode")


def batch_of(mode: Any, descriptor: Any) -> Batch:
    """The batch of a descriptor of any release, run in this mode."""
    reqs = getattr(descriptor, "num_reqs", None)
    uniform = getattr(descriptor, "uniform", None)
    if uniform is None:
        uniform = getattr(descriptor, "uniform_decode", False)
    lora = getattr(descriptor, "has_lora", False) or getattr(descriptor, "num_active_loras", 0)
    return Batch(
        getattr(mode, "name", str(mode)),
        int(descriptor.num_tokens),
        None if reqs is None else int(reqs),
        int(bool(uniform)),
        int(bool(lora)),
    )


def batch_of_execution(descriptor: Any) -> Batch:
    """As ``batch_of``, for a descriptor of model runner V2, which includes its mode."""
    batch = batch_of(descriptor.cg_mode, descriptor)
    uniform = getattr(descriptor, "uniform_token_count", None) is not None
    uniform = uniform or getattr(descriptor, "max_query_len", None) is not None
    return batch._replace(uniform=int(uniform))


def current() -> Capture:
    """The capture that the caller's callers are at; of source ``unknown`` where none is known."""
    frame: FrameType | None = sys._getframe(1)
    found: Capture | None = None
    drafts = False
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if found is None:
            found = _read(module, frame)
        drafts = drafts or module.startswith(_DRAFTERS)
        frame = frame.f_back
    found = found or Capture(None, "unknown", "unknown", None)
    return found._replace(part="drafter") if drafts else found


def _read(module: str, frame: FrameType) -> Capture | None:
    read = _READERS.get((module, frame.f_code.co_name))
    if read is None:
        return None
    try:
        return read(frame.f_locals)
    except (LookupError, AttributeError, AssertionError, TypeError, ValueError):
        # A release that names things otherwise: the capture is recorded with an unknown source.
        return None


def _by_wrapper(local: dict[str, Any]) -> Capture | None:
    wrapper, entry = local["self"], local.get("entry")
    if entry is None:
        return None
    batch = batch_of(wrapper.runtime_mode, entry.batch_descriptor)
    # The pieces of a model have a wrapper each, and share the context of one forward pass.
    context = _forward_context() if batch.mode == "PIECEWISE" else None
    return Capture(batch, "CUDAGraphWrapper", "model", context)


def _by_breakable(local: dict[str, Any]) -> Capture | None:
    entry = local["entry"]
    context = sys.modules["vllm.forward_context"].get_forward_context()
    batch = batch_of(context.cudagraph_runtime_mode, entry.batch_descriptor)
    return Capture(batch, "BreakableCUDAGraphWrapper", "model", weakref.ref(entry))


def _by_manager(local: dict[str, Any]) -> Capture | None:
    descriptor = local.get("desc")
    if descriptor is None:
        return None
    return Capture(batch_of_execution(descriptor), "CudaGraphManager", "model", None)


def _by_ubatches(local: dict[str, Any]) -> Capture | None:
    tokens = sum(int(ubatch.num_tokens) for ubatch in local["ubatch_metadata"])
    return Capture(Batch("FULL", tokens, None, 0, 0), "UBatchWrapper", "model", None)


def _by_encoder(local: dict[str, Any]) -> Capture | None:
    tokens = int(local["token_budget"])
    return Capture(Batch("FULL", tokens, None, 0, 0), "EncoderCudaGraphManager", "encoder", None)


def _by_piecewise_backend(local: dict[str, Any]) -> Capture | None:
    entry = local.get("entry")
    if entry is None:
        return None
    batch = Batch("PIECEWISE", int(entry.runtime_shape), None, 0, 0)
    return Capture(batch, "CUDAPiecewiseBackend", "model", _forward_context())


def _forward_context() -> weakref.ref[Any] | None:
    try:
        return weakref.ref(sys.modules["vllm.forward_context"].get_forward_context())
    except (KeyError, AttributeError, AssertionError, TypeError):
        return None


_READERS: dict[tuple[str, str], Callable[[dict[str, Any]], Capture | None]] = {
    ("vllm.compilation.cuda_graph", "__call__"): _by_wrapper,
    ("vllm.compilation.breakable_cudagraph", "_capture"): _by_breakable,
    ("vllm.v1.worker.gpu.cudagraph_utils", "capture"): _by_manager,
    ("vllm.v1.worker.gpu_ubatch_wrapper", "_capture_ubatches"): _by_ubatches,
    ("vllm.v1.worker.encoder_cudagraph", "_capture_budget_graph"): _by_encoder,
    ("vllm.compilation.cuda_piecewise_backend", "__call__"): _by_piecewise_backend,
    ("vllm.compilation.backends", "__call__"): _by_piecewise_backend,
}
"""By module and function that captures: what reads the capture from its local variables."""
