# SPDX-License-Identifier: Apache-2.0
"""A model runner that runs its model as vLLM's second one does.

vLLM's ModelCudaGraphManager captures, dispatches and replays; ``capture_model`` and
``profile_cudagraph_memory`` are those of vLLM's GPUModelRunner, bound to this one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.graphs.cuda import Cuda
from tests.graphs.recording import Execution
from tests.graphs.steps import MAX_TOKENS, Output, expected_output
from tests.graphs.toys import Piece, attend


class Model(torch.nn.Module):
    """Pieces, each captured by itself or, with breakable graphs, between eager attentions."""

    def __init__(self, settings: VllmConfig, pieces: int, *, breakable: bool) -> None:
        super().__init__()
        mode = CUDAGraphMode.PIECEWISE
        self.pieces = [
            Piece(number) if breakable else CUDAGraphWrapper(Piece(number), settings, mode)
            for number in range(pieces)
        ]
        self.attend = eager_break_during_capture(attend) if breakable else attend

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        """Run it on the static buffer that ``input_ids`` is a part of."""
        x = input_ids
        for piece in self.pieces:
            x = piece(x)
            self.attend(x)
        return x


class RunnerV2:
    """Executes the model; ``seen`` lists the executions, as those of ``toys.Runner``."""

    capture_model = GPUModelRunner.capture_model
    profile_cudagraph_memory = GPUModelRunner.profile_cudagraph_memory

    def __init__(
        self, settings: VllmConfig, cuda: Cuda, pieces: int = 3, *, breakable: bool = False
    ) -> None:
        self.vllm_config = settings
        self.compilation_config = settings.compilation_config
        self.parallel_config = settings.parallel_config
        self.cache_config = settings.cache_config
        self.pieces = pieces
        self.breakable = breakable
        self.model = Model(settings, pieces, breakable=breakable)
        self.input_buffers = InputBuffers(8, MAX_TOKENS, torch.device("cpu"))
        self.cuda = cuda
        self.seen: list[Execution] = []
        self.cudagraph_manager: ModelCudaGraphManager | None = None
        self.initialize_graphs()
        # What vLLM's methods ask for, of which this runner has nothing.
        self.model_state: Any = SimpleNamespace(
            supports_mm_inputs=False,
            prepare_dummy_inputs=lambda *_: {},
            prepare_attn=lambda *_, **__: None,
            capture_inner_cudagraphs=lambda *_: None,
        )
        self.block_tables: Any = SimpleNamespace(
            cp_size=1,
            get_dummy_block_tables=lambda _: (),
            get_dummy_slot_mappings=lambda number: torch.zeros(0, number),
        )
        self.kv_cache_config: Any = SimpleNamespace(kv_cache_groups=[])
        self.kv_connector = SimpleNamespace(reset_capture_state=lambda: None)
        self.attn_groups: list[Any] = []
        self.lora_config = self.speculator = self.adaptive_verification = None
        self.pcp_manager = self.intermediate_tensors = None
        self.use_aux_hidden_state_outputs = False

    def initialize_graphs(self) -> None:
        """Decide which graphs there are to be."""
        self.cudagraph_manager = ModelCudaGraphManager(
            self.vllm_config,
            torch.device("cpu"),
            self.compilation_config.cudagraph_mode,
            decode_query_len=1,
        )

    def maybe_setup_dummy_loras(self, _: Any) -> Any:
        """There are none."""
        return torch.inference_mode()

    @torch.inference_mode()
    def execute_model(
        self,
        scheduler_output: Output,
        intermediate_tensors: Any = None,
        dummy_run: bool = False,
        is_profile: bool = False,
    ) -> torch.Tensor | None:
        """Run a step's batch."""
        if not dummy_run and scheduler_output.total_num_scheduled_tokens == 0:
            return None
        tokens = scheduler_output.tokens
        uniform = max(tokens) if len(set(tokens)) == 1 else None
        descriptor, _ = dispatch_cg_and_sync_dp(
            self.cudagraph_manager,
            len(tokens),
            sum(tokens),
            uniform,
            1,
            0,
            max_query_len=max(tokens),
            need_eager=is_profile,
            num_active_loras=0,
            parallel_config=self.parallel_config,
            uniform_decode=uniform == 1,
        )
        manager = self.cudagraph_manager
        assert manager is not None
        number = sum(tokens)
        self.input_buffers.input_ids[:number] = torch.arange(number)
        before = self.cuda.count("replay")
        if descriptor.cg_mode == CUDAGraphMode.FULL:
            output = manager.run_fullgraph(descriptor)
        else:
            inputs = {"input_ids": self.input_buffers.input_ids[: descriptor.num_tokens]}
            with set_forward_context(
                None,
                self.vllm_config,
                num_tokens=descriptor.num_tokens,
                cudagraph_runtime_mode=descriptor.cg_mode,
                batch_descriptor=BatchDescriptor(descriptor.num_tokens),
            ):
                if descriptor.cg_mode == CUDAGraphMode.PIECEWISE:
                    output = manager.run_pw_graph(self.model, inputs)
                else:
                    output = self.model(**inputs)
        mode = descriptor.cg_mode.name
        known = (descriptor.num_reqs, 1) if mode == "FULL" else (None, 0)
        self.seen.append(
            Execution(
                (mode, descriptor.num_tokens, *known, 0),
                number,
                self.cuda.count("replay") - before,
                int(dummy_run),
            )
        )
        assert isinstance(output, torch.Tensor)
        return output[:number].clone()

    def _dummy_run(self, num_tokens: int, *args: Any, is_profile: bool = False, **_: Any) -> Any:
        requests = min(num_tokens, 8)
        tokens = [num_tokens // requests] * requests
        tokens[-1] += num_tokens % requests
        return self.execute_model(Output(tokens), dummy_run=True, is_profile=is_profile)

    def outputs(self, number: int) -> list[float]:
        """What an execution of so many tokens has to return."""
        return expected_output(list(range(number)), self.pieces)
