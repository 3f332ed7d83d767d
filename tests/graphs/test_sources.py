# SPDX-License-Identifier: Apache-2.0
"""Which part of vLLM captured a CUDA graph, for each part that does, and for unknown ones."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.graphs.recording import Entry, Execution, Recording
from tests.graphs.steps import Output, called_in, decode

UNKNOWN = Entry(None, "unknown", "capture", "unknown")


def capture(graph: Any, run: Callable[[], Any] = list) -> Any:
    """Capture it, as nobody in vLLM does."""
    import torch

    with torch.cuda.graph(graph):
        run()
    return graph


def test_microbatches(cuda: Any, recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import (
        BatchDescriptor,
        DPMetadata,
        ForwardContext,
        override_forward_context,
    )
    from vllm.v1.worker import gpu_ubatch_wrapper
    from vllm.v1.worker.ubatch_utils import UBatchSlice

    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    monkeypatch.setattr(gpu_ubatch_wrapper, "create_sm_control_context", lambda _: nullcontext())
    parallel = SimpleNamespace(
        num_ubatches=2, data_parallel_size=2, data_parallel_rank=0, is_moe_model=True
    )
    settings: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(fast_moe_cold_start=False, static_forward_context={}),
        parallel_config=parallel,
        use_cumem_cudagraph_pool=False,
    )

    def model(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ids * 2

    wrapper = gpu_ubatch_wrapper.UBatchWrapper(
        model, settings, CUDAGraphMode.FULL, torch.device("cpu")
    )
    slices = [UBatchSlice(slice(4 * i, 4 * i + 4), slice(4 * i, 4 * i + 4)) for i in range(2)]
    numbers = torch.arange(8)
    for ubatches in (slices, slices, None, slices):
        context = ForwardContext(
            no_compile_layers={},
            attn_metadata=None,
            slot_mapping={},
            dp_metadata=DPMetadata(torch.tensor([8, 8])),
            cudagraph_runtime_mode=CUDAGraphMode.FULL,
            batch_descriptor=BatchDescriptor(8 if ubatches else 2, 2, True),
            ubatch_slices=ubatches,
        )
        with override_forward_context(context):
            inputs = numbers if ubatches else numbers[:2]
            output = wrapper(
                input_ids=inputs,
                positions=inputs,
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        assert output.tolist() == (inputs * 2).tolist()
    found = recording.end()
    assert (cuda.count("end"), cuda.count("replay")) == (2, 2)
    assert list(found.entries.values()) == [
        Entry(("FULL", 8, None, 0, 0), "UBatchWrapper"),
        Entry(("FULL", 2, 2, 1, 0), "CUDAGraphWrapper"),
    ]
    assert found.replays == [(1, 2)]


class Encoder:
    """A vision encoder of one multiplication."""

    def get_encoder_cudagraph_config(self) -> Any:
        """One path, one buffer."""
        from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphConfig

        return EncoderCudaGraphConfig(["image"], ["pixels"], out_hidden_size=1)

    def prepare_encoder_cudagraph_capture_inputs(self, tokens: int, *_: Any) -> Any:
        """The static buffer."""
        import torch

        return SimpleNamespace(values={"pixels": torch.zeros(tokens)})

    def encoder_cudagraph_forward(self, values: dict[str, Any], path: str) -> Any:
        """What is captured."""
        return values["pixels"] * 3

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
        """One item."""
        return [mm_kwargs]

    def prepare_encoder_cudagraph_replay_buffers(self, mm_kwargs: Any, *_: Any) -> Any:
        """What is replayed on."""
        return SimpleNamespace(values=mm_kwargs)


def test_encoder(cuda: Any, recording: Recording) -> None:
    import torch
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    settings: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(
            encoder_cudagraph_token_budgets=[4, 16],
            encoder_cudagraph_max_vision_items_per_batch=2,
            encoder_cudagraph_max_frames_per_batch=None,
        ),
        model_config=SimpleNamespace(
            multimodal_config=SimpleNamespace(
                get_limit_per_prompt=lambda _: 0, mm_encoder_tp_mode="weights"
            )
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    encoder: Any = Encoder()
    manager = EncoderCudaGraphManager(settings, torch.device("cpu"), torch.float32, encoder)
    manager.capture(torch.cuda.graph_pool_handle())
    for budget in (16, 4, 16):
        output = manager._run_budget_graph({"pixels": torch.arange(3.0)}, budget)
        assert output is not None
        assert output.tolist() == [0, 3, 6] + [0] * (budget - 3)
    found = recording.end()
    assert list(found.entries.values()) == [
        Entry(("FULL", budget, None, 0, 0), "EncoderCudaGraphManager", part="encoder")
        for budget in (16, 4)
    ]
    assert sorted(found.replays) == [(1, 2), (2, 1)]
    assert cuda.count("replay") == 3


def test_drafter(toys: Any, model: Path, cuda: Any, recording: Recording) -> None:
    runner = toys.DraftingRunner(toys.config(model), cuda)
    recording.watch(runner)
    runner.capture_model()
    captured = len(runner.seen)
    runner.execute_model(decode(2))
    runner.propose(2)
    runner.propose(2)
    runner.execute_model(Output([5]))
    runner.propose(8)
    found = recording.end()
    drafts = {
        entry.batch[1]: number
        for number, entry in found.entries.items()
        if entry.part == "drafter" and entry.source == "CUDAGraphWrapper"
    }
    assert sorted(drafts) == [2, 4, 8, 16, 32]
    assert {found.graphs_of(number) for number in drafts.values()} == {2}
    models = [entry.batch for entry in found.entries.values() if entry.part == "model"]
    assert len(models) == len(set(models)) == 9
    # A batch that was captured is the model's, whatever the drafter captured after it.
    assert found.executions == runner.seen
    assert found.executions[captured:] == [
        Execution(("FULL", 2, 2, 1, 0), 2, 1),
        Execution(("PIECEWISE", 8, None, 0, 0), 5, 3),
    ]
    assert found.replays[-2:] == [(drafts[2], 4), (drafts[8], 2)]
    # At start-up, those of FULL were captured after those of PIECEWISE had been.
    assert found.replays[:-2] == [(drafts[size], 2) for size in (16, 8, 4, 2)]


def test_a_graph_that_nobody_named(cuda: Any, recording: Recording) -> None:
    graph = capture(cuda.graph_class())
    graph.replay()
    graph.replay()
    found = recording.end()
    assert list(found.entries.values()) == [UNKNOWN]
    assert found.captures == [(1, cuda.graph_bytes >> 10)]
    assert found.replays == [(1, 2)]


def test_a_graph_captured_before_anybody_watched(cuda: Any, tmp_path: Path) -> None:
    graph = capture(cuda.graph_class())
    recording = Recording(tmp_path / "worker0.journal", cuda.graph_class)
    graph.replay()
    found = recording.end()
    assert (found.entries, found.captures, found.replays) == ({}, [], [(0, 1)])


@pytest.mark.parametrize("is_capture_seen", [True, False])
def test_unknown_graphs_of_an_execution_are_those_that_it_was_dispatched_to(
    toys: Any,
    model: Path,
    cuda: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_capture_seen: bool,
) -> None:
    """A later release may capture somewhere else. Its executions still are not eager."""
    from profilemate.hooks.gpu import graph_sources

    monkeypatch.setattr(graph_sources, "_READERS", {})
    runner = toys.Runner(toys.config(model), cuda)
    if not is_capture_seen:
        runner.capture_model()
    recording = Recording(tmp_path / "worker0.journal", cuda.graph_class)
    recording.watch(runner)
    if is_capture_seen:
        runner.capture_model()
    runner.seen.clear()
    runner.execute_model(decode(3))
    runner.execute_model(Output([30]))
    sampler = capture(cuda.graph_class())
    runner.model.runnable, forward = (
        lambda x: (sampler.replay(), forward(x))[1],
        (runner.model.runnable),
    )
    runner.execute_model(Output([30]))
    found = recording.end()
    assert found.executions[-3:] == [
        Execution(("FULL", 4, 4, 1, 0), 3, 1),
        Execution(("NONE", 30, None, 0, 0), 30, 0),
        # An eager batch's graphs are no part of it.
        Execution(("NONE", 30, None, 0, 0), 30, 0),
    ]
    assert found.replays == [(len(found.entries), 1)]


def test_memory_is_not_known_where_it_cannot_be_asked(
    cuda: Any, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def fail() -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    capture(cuda.graph_class())
    assert recording.end().captures == [(1, None)]


def test_replays_of_another_thread(model: Path, cuda: Any, recording: Recording) -> None:
    graph = capture(cuda.graph_class())
    thread = threading.Thread(target=graph.replay)
    thread.start()
    thread.join()
    assert recording.end().replays == [(1, 1)]


OldDescriptor = namedtuple("OldDescriptor", ["num_tokens", "uniform_decode"])


class OldRunner:
    """As of vLLM 0.10.2: it pads by itself, and a dispatcher finds no descriptor for eager."""

    def __init__(self, settings: Any, piece: Any) -> None:
        from vllm.compilation.cuda_graph import CUDAGraphWrapper
        from vllm.config import CUDAGraphMode

        self.settings = settings
        self.cudagraph_dispatcher = OldDispatcher()
        self.model = CUDAGraphWrapper(piece, settings, CUDAGraphMode.FULL)

    def execute_model(self, scheduler_output: Output, intermediate_tensors: Any = None) -> Any:
        """Decode batches of up to 4 in graphs of 4, all else eagerly."""
        import torch
        from vllm.forward_context import set_forward_context

        number = scheduler_output.total_num_scheduled_tokens
        uniform = set(scheduler_output.tokens) == {1}
        padded = max(4, number)
        mode, descriptor = self.cudagraph_dispatcher.dispatch(OldDescriptor(padded, uniform))
        context = {"cudagraph_runtime_mode": mode, "batch_descriptor": descriptor}
        with set_forward_context(None, self.settings, num_tokens=padded, **context):
            return self.model(torch.zeros(padded))

    def _dummy_run(self, num_tokens: int) -> None:
        """An eager one asks nobody."""


class OldDispatcher:
    """Answers as that of vLLM 0.10.2."""

    def dispatch(self, batch_descriptor: Any) -> tuple[Any, Any]:
        """Mode and descriptor."""
        from vllm.config import CUDAGraphMode

        if batch_descriptor.num_tokens == 4 and batch_descriptor.uniform_decode:
            return CUDAGraphMode.FULL, batch_descriptor
        return CUDAGraphMode.NONE, None


def test_names_of_old_releases(toys: Any, model: Path, cuda: Any, recording: Recording) -> None:
    runner = OldRunner(toys.config(model), toys.Piece(1))
    recording.watch(runner)
    runner.execute_model(decode(3))
    runner.execute_model(decode(4))
    runner.execute_model(Output([9]))
    runner._dummy_run(5)
    found = recording.end()
    full = ("FULL", 4, None, 1, 0)
    assert list(found.entries.values()) == [Entry(full, "CUDAGraphWrapper")]
    assert found.executions == [
        Execution(full, 3, 0),
        Execution(full, 4, 1),
        Execution(("NONE", 9, None, 0, 0), 9, 0),
        Execution(("NONE", 5, None, 0, 0), 5, 0, dummy=1),
    ]


class OlderRunner:
    """As of vLLM 0.8.5: no dispatcher, and pieces that choose by their shape."""

    def __init__(self, cuda: Any) -> None:
        self.entries: dict[int, list[Any]] = {}
        backend = "vllm.compilation.backends"
        self._piece = called_in(backend, __call__, capture=capture, cuda=cuda)

    def execute_model(self, scheduler_output: Output, intermediate_tensors: Any = None) -> None:
        """Two pieces up to 4 tokens, else eagerly."""
        from vllm.forward_context import ForwardContext, override_forward_context

        number = scheduler_output.total_num_scheduled_tokens
        if 0 < number <= 4:
            pieces = self.entries.setdefault(
                4, [SimpleNamespace(runtime_shape=4, cudagraph=None) for _ in range(2)]
            )
            context = ForwardContext(no_compile_layers={}, attn_metadata=None, slot_mapping={})
            with override_forward_context(context):
                for piece in pieces:
                    self._piece(piece)


def __call__(entry: Any) -> None:  # noqa: N807
    """What a piece does, up to vLLM 0.9."""
    if entry.cudagraph is None:
        entry.cudagraph = capture(cuda.graph_class())  # type: ignore[name-defined] # noqa: F821
    else:
        entry.cudagraph.replay()


def test_pieces_of_older_releases(cuda: Any, recording: Recording) -> None:
    runner = OlderRunner(cuda)
    recording.watch(runner)
    for step in (decode(3), decode(4), Output([9]), decode(0)):
        runner.execute_model(step)
    found = recording.end()
    piecewise = ("PIECEWISE", 4, None, 0, 0)
    assert list(found.entries.values()) == [Entry(piecewise, "CUDAPiecewiseBackend")]
    assert found.graphs_of(1) == 2
    assert found.executions == [
        Execution(piecewise, 3, 0),
        Execution(piecewise, 4, 2),
        Execution(("NONE", 9, None, 0, 0), 9, 0),
    ]
