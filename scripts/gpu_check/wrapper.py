# SPDX-License-Identifier: Apache-2.0
"""Is what vLLM's real CUDAGraphWrapper captures and replays recorded with its mode and batch?"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from profilemate.format.events import Op

from .recording import Runner, batch, recording
from .report import Report

SIZES = (1, 8, 64)
PIECES = 3
REPLAYS = 10
PADDING = 1
"""Tokens that each batch is padded by."""


def check(report: Report, folder: Path) -> None:
    """Capture each size whole and in pieces, replay it, and read what was recorded."""
    try:
        from vllm import _custom_ops  # noqa: F401 (loads the kernels that the wrapper calls)
        from vllm.config import CUDAGraphMode
    except ImportError as error:
        report.note("left out", f"vLLM cannot be imported here: {error}")
        return
    works: list[bool] = []
    with recording(folder, "wrapper") as recorded, torch.cuda.stream(torch.cuda.Stream()):
        for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
            pieces = 1 if mode == CUDAGraphMode.FULL else PIECES
            works += [_run(recorded, mode, size, pieces) for size in SIZES]
    report.check("output as without graphs", works, [True] * 2 * len(SIZES))

    entries = {number: json.loads(blob) for _, number, blob in recorded.events(Op.GRAPH)}
    wanted = [[mode, size] for mode in ("FULL", "PIECEWISE") for size in SIZES]
    report.check("captured", [entry[:2] for entry in entries.values()], wanted)
    sources = {(entry[5], entry[7]) for entry in entries.values()}
    report.check("by", sources, {("CUDAGraphWrapper", "model")})
    graphs = Counter(entries[event[2]][0] for event in recorded.events(Op.CAPTURE))
    report.check(
        "CUDA graphs", dict(graphs), {"FULL": len(SIZES), "PIECEWISE": PIECES * len(SIZES)}
    )
    ran = Counter(
        (*entries[event[3]][:2], event[2], event[4])
        for event in recorded.events(Op.EXECUTION)
        if event[3]
    )
    expected = {
        (mode, size, size - PADDING, pieces): REPLAYS
        for mode, pieces in (("FULL", 1), ("PIECEWISE", PIECES))
        for size in SIZES
    }
    report.check("executions that replayed", dict(ran) == expected, True)


def _run(recorded: Any, mode: Any, size: int, pieces: int) -> bool:
    """Whether replays give what the wrapped functions would."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.forward_context import BatchDescriptor, ForwardContext, override_forward_context

    settings: Any = SimpleNamespace(compilation_config=None, use_cumem_cudagraph_pool=False)
    context = ForwardContext(
        no_compile_layers={},
        attn_metadata=None,
        slot_mapping={},
        cudagraph_runtime_mode=mode,
        batch_descriptor=BatchDescriptor(num_tokens=size),
    )
    given = torch.zeros(size, device="cuda")
    buffers = [torch.zeros(size, device="cuda") for _ in range(pieces)]
    wrappers = [CUDAGraphWrapper(buffer.copy_, settings, mode) for buffer in buffers]

    def forward() -> torch.Tensor:
        value = given
        for wrapper in wrappers:
            value = wrapper(value)
        return value

    runner = Runner(forward, size)
    recorded.watch(runner)
    with override_forward_context(context):
        runner.execute_model(batch(size - PADDING))
        same = []
        for replay in range(REPLAYS):
            given.fill_(float(replay + 1))
            runner.execute_model(batch(size - PADDING))
            same.append(buffers[-1].tolist() == [float(replay + 1)] * size)
    return all(same)
