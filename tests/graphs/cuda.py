# SPDX-License-Identifier: Apache-2.0
"""What stands in for CUDA graphs where there is no GPU, and counts what is done with them.

``torch.cuda.CUDAGraph`` and ``torch.cuda.graph`` are replaced. While a graph is captured, torch's
operations run, and are noted; a replay runs them again and puts what they return where it was put
first. So an output changes at a replay as the inputs have, and where nothing is replayed it does
not.

torch for CPUs lacks what vLLM calls around them. In its place: a number for the free memory of
the device, of which each capture takes ``graph_bytes``; a pool's handle that is a number; streams,
synchronize and empty_cache that do nothing; and tensors themselves for weak references to them.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TOTAL_BYTES = 1 << 36


class Cuda:
    """One stand-in, in place between ``with`` and its end.

    ``events`` lists what was done with graphs, in order: ``begin``, ``end`` or ``replay``, and the
    graph. ``free_bytes`` is the device's memory that is left. ``graph_class`` is what becomes
    ``torch.cuda.CUDAGraph``, for who needs another.
    """

    def __init__(self, graph_bytes: int = 3 << 20, graph_class: type[Any] | None = None) -> None:
        self.events: list[tuple[str, Any]] = []
        self.free_bytes = TOTAL_BYTES
        self.graph_bytes = graph_bytes
        self.capturing = 0
        self.graph_class = graph_class or _graph_class(self)
        self._pools = itertools.count(1)
        self._patches = ExitStack()

    def count(self, event: str) -> int:
        """How often this was done."""
        return sum(1 for known, _ in self.events if known == event)

    def __enter__(self) -> Cuda:
        import vllm.platforms
        from vllm.compilation import monitor
        from vllm.utils import torch_utils

        platform = type(vllm.platforms.current_platform)
        self._replace(torch.cuda, "CUDAGraph", self.graph_class)
        self._replace(torch.cuda, "graph", _CaptureInto)
        self._replace(torch.cuda, "graph_pool_handle", self._new_pool)
        self._replace(torch.cuda, "mem_get_info", self._memory)
        self._replace(torch.cuda, "is_current_stream_capturing", lambda: self.capturing > 0)
        self._replace(torch.cuda, "Stream", _Stream)
        self._replace(torch.cuda, "stream", lambda stream: stream)
        self._replace(torch.cuda, "current_stream", _Stream)
        self._replace(torch.cuda, "current_blas_handle", int)
        self._replace(torch.accelerator, "get_memory_info", self._memory)
        self._replace(torch.accelerator, "synchronize", lambda *_: None)
        self._replace(torch.accelerator, "empty_cache", lambda *_: None)
        self._replace(torch.accelerator, "set_device_index", lambda *_: None)
        self._replace(torch.ops._C, "weak_ref_tensor", lambda tensor: tensor)
        self._replace(platform, "graph_pool_handle", self._new_pool)
        self._replace(platform, "_global_graph_pool", None)
        self._replace(monitor, "cudagraph_capturing_enabled", True)
        self._replace(torch_utils._current_stream_tls, "value", _Stream())
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _replace(self, owner: Any, name: str, ours: Any) -> None:
        self._patches.enter_context(mock.patch.object(owner, name, ours, create=True))

    def _new_pool(self, *_: Any) -> tuple[int, int]:
        return 0, next(self._pools)

    def _memory(self, *_: Any) -> tuple[int, int]:
        return self.free_bytes, TOTAL_BYTES


class _Stream:
    """A stream on which everything is done as soon as it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None:
        """Nothing is under way."""

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Operations(TorchDispatchMode):
    """Notes the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.noted.append((function, args, kwargs or {}, result))
        return result

    def run(self) -> None:
        """Run them again, into the tensors that they returned."""
        for function, args, kwargs, result in self.noted:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _graph_class(cuda: Cuda) -> type[Any]:
    """A class of its own for each stand-in: hooks change the class."""

    class CUDAGraph:
        """A graph as torch has it."""

        def __init__(self, keep_graph: bool = False) -> None:
            self._operations: _Operations | None = None
            self._pool: Any = None

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            """Begin to note what runs."""
            cuda.events.append(("begin", self))
            cuda.capturing += 1
            self._pool = pool
            self._operations = _Operations()
            self._operations.__enter__()

        def capture_end(self) -> None:
            """End it."""
            assert self._operations is not None
            self._operations.__exit__(None, None, None)
            cuda.capturing -= 1
            cuda.free_bytes -= cuda.graph_bytes
            cuda.events.append(("end", self))

        def replay(self) -> None:
            """Run what was captured."""
            if self._operations is None:
                raise RuntimeError("nothing was captured")
            cuda.events.append(("replay", self))
            with torch.inference_mode():
                self._operations.run()

        def reset(self) -> None:
            """Forget what was captured."""
            self._operations = None

        def pool(self) -> Any:
            """Where its memory is."""
            return self._pool

    CUDAGraph.__qualname__ = "CUDAGraph"
    return CUDAGraph


class _CaptureInto:
    """In place of ``torch.cuda.graph``: captures what its block runs."""

    def __init__(self, cuda_graph: Any, pool: Any = None, stream: Any = None, **_: Any) -> None:
        self._graph, self._pool = cuda_graph, pool

    def __enter__(self) -> None:
        self._graph.capture_begin(*(() if self._pool is None else (self._pool,)))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._graph.capture_end()
