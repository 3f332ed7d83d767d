# SPDX-License-Identifier: Apache-2.0
"""A model of a few pieces, and a model runner that runs it as vLLM's own does.

What decides how a batch is run and what captures graphs are the methods of vLLM's GPUModelRunner,
bound to this one. Only what prepares inputs for a real model is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.graphs.cuda import Cuda
from tests.graphs.recording import Batch, Execution
from tests.graphs.steps import MAX_TOKENS, SIZES, Output, called_in, expected_output


def config(model: Path, mode: str = "FULL_AND_PIECEWISE", **engine_args: Any) -> VllmConfig:
    """vLLM's configuration, with the CUDA graphs that a GPU would have."""
    arguments = {"model": str(model), "load_format": "dummy", "max_model_len": 256}
    made = EngineArgs(**{**arguments, "max_num_seqs": 8, **engine_args}).create_engine_config()
    compilation = made.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode[mode]
    compilation.cudagraph_capture_sizes = list(SIZES)
    compilation.max_cudagraph_capture_size = max(SIZES)
    compilation.is_attention_compiled_piecewise = lambda: True
    return made


class Piece:
    """A piece between two attentions: doubles and adds its number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self.number


def attend(x: torch.Tensor) -> torch.Tensor:
    """What is between two pieces, and writes where it has to, as attention does."""
    return x.add_(1)


def build_model(settings: VllmConfig, pieces: int) -> CUDAGraphWrapper:
    """Pieces that can be captured one by one, in a whole that can."""
    wrapped = [
        CUDAGraphWrapper(Piece(number), settings, CUDAGraphMode.PIECEWISE)
        for number in range(pieces)
    ]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for piece in wrapped:
            x = attend(piece(x))
        return x

    return CUDAGraphWrapper(forward, settings, CUDAGraphMode.FULL)


class Runner:
    """Executes the model.

    ``seen`` lists the executions with what the dispatcher answered and what the stand-in counted;
    it is written here, beside what is tested. ``fail_with`` is raised in place of the model.
    """

    _is_uniform_decode = staticmethod(GPUModelRunner._is_uniform_decode)
    _determine_batch_execution_and_padding = GPUModelRunner._determine_batch_execution_and_padding
    profile_cudagraph_memory = GPUModelRunner.profile_cudagraph_memory
    capture_model = GPUModelRunner.capture_model
    _capture_cudagraphs = GPUModelRunner._capture_cudagraphs
    _warmup_and_capture = GPUModelRunner._warmup_and_capture

    def __init__(self, settings: VllmConfig, cuda: Cuda, pieces: int = 3) -> None:
        self.vllm_config = settings
        self.compilation_config = settings.compilation_config
        self.parallel_config = settings.parallel_config
        self.scheduler_config = settings.scheduler_config
        self.load_config = SimpleNamespace(use_tqdm_on_load=False)
        self.model_config = SimpleNamespace(is_encoder_decoder=False)
        self.input_batch = SimpleNamespace(lora_id_to_lora_request={})
        self.uniform_decode_query_len = 1
        self.max_model_len = 256
        self.max_num_tokens = MAX_TOKENS
        self.lora_config = None
        self.encoder_cudagraph_manager = None
        self.device = torch.device("cpu")
        self.pieces = pieces
        self.model = build_model(settings, pieces)
        self.input = torch.zeros(MAX_TOKENS)
        self.cuda = cuda
        self.seen: list[Execution] = []
        self.fail_with: BaseException | None = None
        self.run_eagerly = False
        self.cudagraph_dispatcher = CudagraphDispatcher(settings)
        self.initialize_graphs()

    def initialize_graphs(self) -> None:
        """Decide which graphs there are to be."""
        mode = self.compilation_config.cudagraph_mode
        self.cudagraph_dispatcher.initialize_cudagraph_keys(mode, 1)

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output: Output, intermediate_tensors: Any = None
    ) -> torch.Tensor | None:
        """Run a step's batch."""
        if not scheduler_output.total_num_scheduled_tokens:
            return None
        return self._run(scheduler_output.tokens, dummy=0)

    @torch.inference_mode()
    def _dummy_run(
        self,
        num_tokens: int,
        cudagraph_runtime_mode: CUDAGraphMode | None = None,
        force_attention: bool = False,
        uniform_decode: bool = False,
        **_: Any,
    ) -> torch.Tensor | None:
        """Run a batch that nobody asked for."""
        requests = min(num_tokens, 8)
        tokens = [num_tokens // requests] * requests
        tokens[-1] += num_tokens % requests
        return self._run(tokens, 1, uniform_decode, cudagraph_runtime_mode)

    def _run(
        self,
        tokens: list[int],
        dummy: int,
        uniform: bool | None = None,
        wanted: CUDAGraphMode | None = None,
    ) -> torch.Tensor | None:
        number = sum(tokens)
        mode, descriptor, *_ = self._determine_batch_execution_and_padding(
            num_tokens=number,
            num_reqs=len(tokens),
            num_scheduled_tokens_np=np.array(tokens, dtype=np.int32),
            max_num_scheduled_tokens=max(tokens),
            use_cascade_attn=False,
            force_eager=wanted is CUDAGraphMode.NONE,
            force_uniform_decode=uniform,
        )
        assert wanted is None or mode is wanted
        if self.fail_with is not None:
            raise self.fail_with
        self.input[:number] = torch.arange(number)
        before = self.cuda.count("replay")
        captured = self.cuda.count("end")
        with set_forward_context(
            None,
            self.vllm_config,
            num_tokens=descriptor.num_tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE if self.run_eagerly else mode,
            batch_descriptor=descriptor,
        ):
            output = self.model(self.input[: descriptor.num_tokens])
        replayed = self.cuda.count("replay") - before
        batch: Batch = (
            mode.name,
            descriptor.num_tokens,
            descriptor.num_reqs,
            int(descriptor.uniform),
            int(descriptor.has_lora),
        )
        if not replayed and captured == self.cuda.count("end"):
            batch = ("NONE", descriptor.num_tokens, None, 0, 0)
        self.seen.append(Execution(batch, number, replayed, dummy))
        return output[:number].clone()

    def outputs(self, number: int) -> list[float]:
        """What an execution of so many tokens has to return."""
        return expected_output([float(value) for value in range(number)], self.pieces)

    # What vLLM's methods call, of which this runner has nothing.
    def _init_minimal_kv_cache_for_profiling(self) -> None: ...

    def _cleanup_profiling_kv_cache(self) -> None:
        self.initialize_graphs()

    def _create_encoder_cudagraph_manager(self) -> None: ...

    def _maybe_init_encoder_cudagraph_manager(self) -> None: ...

    def maybe_remove_all_loras(self, _: Any) -> None: ...

    def _freeze_gc(self) -> Any:
        return nullcontext()


class IdleRunner(Runner):
    """A data-parallel rank, which runs a dummy where the others have work and it has none."""

    def execute_model(self, scheduler_output: Output, intermediate_tensors: Any = None) -> Any:
        """As vLLM's does with an external launcher."""
        if scheduler_output.total_num_scheduled_tokens:
            return super().execute_model(scheduler_output)
        self._dummy_run(1)
        return None


class DraftingRunner(Runner):
    """One with a drafter, whose model has two pieces and runs after the model did."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.draft_model = build_model(self.vllm_config, 2)
        self._run_in_drafter = called_in("vllm.v1.spec_decode.eagle", run)

    def propose(self, number: int) -> None:
        """Draft for a batch of so many tokens, in graphs, which are captured if need be."""
        self._run_in_drafter(self._draft, number)

    def _draft(self, number: int) -> None:
        with set_forward_context(
            None,
            self.vllm_config,
            num_tokens=number,
            cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE,
            batch_descriptor=BatchDescriptor(number),
        ):
            self.draft_model(self.input[:number])

    def _dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        output = super()._dummy_run(num_tokens, *args, **kwargs)
        if kwargs.get("is_graph_capturing"):
            # Twice as many: batches that the model does not have, so that they are distinct.
            self.propose(2 * num_tokens)
        return output


def run(function: Callable[[int], None], number: int) -> None:
    """Stands for a function of vLLM's drafters."""
    function(number)
