# SPDX-License-Identifier: Apache-2.0
"""Sessions with CUDA graphs, by hand: captures, executions and replays that fit each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.analysis.builder import METADATA, SessionBuilder

MIB = 2**20
GIB = 2**30

SETUP: Mapping[str, Any] = {
    "asked": "FULL_AND_PIECEWISE",
    "resolved": "FULL_AND_PIECEWISE",
    "attention_backends": ["FLASH_ATTN"],
    "capture_sizes": [1, 2, 4, 8],
    "max_capture_size": 8,
    "runner": "V2",
    "gpu_timing": False,
}
WORKER: Mapping[str, Any] = {"pid": 8, "role": "worker", "rank": 0, "hooks": ["graphs"]}


def set_up(session: SessionBuilder, *, scheduler: Mapping[str, Any] = {}, **changes: Any) -> None:
    """The metadata of a session on a GPU; ``scheduler`` and ``changes`` to it."""
    session.metadata(
        **{
            "device": "cuda",
            "cuda_graphs": SETUP,
            "processes": [*METADATA["processes"], WORKER],
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64, **scheduler},
            **changes,
        }
    )


def full(size: int, reqs: int | None = None) -> dict[str, Any]:
    """The descriptor of a FULL graph for decodes."""
    return {
        "runtime_mode": "FULL",
        "num_tokens": size,
        "num_reqs": size if reqs is None else reqs,
        "uniform": 1,
    }


def piecewise(size: int) -> dict[str, Any]:
    """The descriptor of a PIECEWISE graph; such take any number of requests."""
    return {"runtime_mode": "PIECEWISE", "num_tokens": size, "num_reqs": ""}


def eager(tokens: int) -> dict[str, Any]:
    """The descriptor of an execution without a graph."""
    return {
        "runtime_mode": "NONE",
        "num_tokens": tokens,
        "num_reqs": "",
        "num_graphs": 0,
        "launch_us": "",
        "unpadded_tokens": tokens,
    }


def captured(session: SessionBuilder, graphs: Iterable[dict[str, Any]], **other: Any) -> None:
    """Captures, in this order, half a second apart."""
    session.rows(
        "cuda_graph_captures.csv",
        *(
            {"capture_time_sec": 1 + number / 2, **graph, **other}
            for number, graph in enumerate(graphs)
        ),
    )


def ran(
    session: SessionBuilder, batch: dict[str, Any], tokens: int, times: int = 1, **other: Any
) -> None:
    """So many executions of a batch with so many unpadded tokens, and their replays."""
    row = {"unpadded_tokens": tokens, **batch, **other}
    session.rows("cuda_graph_timeline.csv", *([row] * times))
    if row.get("num_graphs", 1):
        columns = ("num_graphs", "worker")
        where = {column: row[column] for column in columns if column in row}
        replayed(session, batch, times, dummy_count=times * row.get("dummy", 0), **where)


def replayed(session: SessionBuilder, graph: dict[str, Any], times: int, **other: Any) -> None:
    """A row of replays, each of which took 10 us to launch."""
    session.rows(
        "cuda_graph_usage.csv",
        {**graph, "replay_count": times, "total_launch_sec": times * 1e-5, **other},
    )


def mixed(session: SessionBuilder) -> None:
    """Decodes in FULL graphs, prompts in PIECEWISE ones, a prompt that is too large for any, and
    dummy executions. Of graphs for 1, 2, 4 and 8 tokens in both modes, four are used, and one by
    dummy executions alone."""
    set_up(session)
    large = [full(8), full(4), full(2), full(1)]
    pieces = [piecewise(size) | {"num_graphs": 3} for size in (8, 4, 2, 1)]
    memory = [64, 4, 2, 0, 32, 2, 2, 0]
    captured(
        session,
        (
            graph | {"memory_bytes": size * MIB}
            for graph, size in zip([*pieces, *large], memory, strict=True)
        ),
    )
    # 10 x 3 tokens in 4, 6 x 8 in 8, 2 x 5 in 8; 2 x 20 eagerly. In all 20 executions of 128.
    ran(session, full(4), 3, 10, launch_us=20)
    ran(session, full(8), 8, 6, launch_us=40)
    ran(session, piecewise(8), 5, 2, launch_us=100, num_graphs=3)
    ran(session, eager(20), 20, 2)
    ran(session, full(1), 1, 7, dummy=1)
    ran(session, full(4), 1, 5, dummy=1)
    replayed(session, full(2), 0)
    for size in (4, 2, 1):
        replayed(session, piecewise(size), 0, num_graphs=3)


def on_the_gpu(session: SessionBuilder) -> None:
    """Something of everything that is recorded of a GPU: two workers, one of which has less memory,
    times on the GPU, and sampled memory."""
    mixed(session)
    memory = {
        "total_bytes": 80 * GIB,
        "requested_bytes": 72 * GIB,
        "weights_bytes": 16 * GIB,
        "activation_bytes": 4 * GIB,
        "non_torch_bytes": GIB,
        "graphs_estimated_bytes": 500 * MIB,
        "graphs_estimate_applied": True,
        "graphs_bytes": 106 * MIB,
        "kv_bytes": 50 * GIB,
        "kv_allocated_bytes": 50 * GIB,
        "blocks": 25600,
    }
    workers = [{"worker": 0, **memory}, {"worker": 1, **memory, "kv_bytes": 51 * GIB}]
    set_up(
        session,
        memory={**workers[0], "workers": workers},
        groups=[{"kind": "FullAttentionSpec", "block_size": 16, "bytes_per_block": 2 * MIB}],
        gpus=[{"gpu": 0, "uuid": "GPU-0", "name": "H100", "total_bytes": 80 * GIB, "workers": [0]}],
        gpu_memory={"interval_sec": 1, "problem": None},
        scheduler={"max_num_seqs": 32, "speculative_tokens": 1},
    )
    captured(session, [full(8)], worker=1)
    captured(session, [full(8)], kind="profiling")
    ran(session, full(8), 6, 4, worker=1, gpu_us=300)
    ran(session, eager(30), 30, 4, worker=1)
    session.rows(
        "gpu_memory.csv",
        {"timestamp_sec": 1, "used_bytes": 70 * GIB, "free_bytes": 10 * GIB},
        {"timestamp_sec": 2, "used_bytes": 72 * GIB, "free_bytes": 8 * GIB},
    )
