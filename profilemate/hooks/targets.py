# SPDX-License-Identifier: Apache-2.0
"""Which methods of vLLM's are watched, since when they exist, and what is lost without each.

The hooks look for them on the objects that really run. This list makes data of what they find,
for metadata.json and for ``profilemate doctor``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from profilemate.hooks.instances import is_hook

OLDEST = "0.8.5"
NEWEST = "0.33.0"
"""The oldest and the newest release of vLLM for which this list was checked."""

EVERYTHING = "everything"
"""The part whose loss leaves nothing."""


@dataclass(frozen=True)
class Target:
    """A method that is watched.

    Attributes:
        module: where vLLM has its class.
        owner: the class.
        method: its name.
        gives: what it is needed for.
        part: the part of the recording (``events.PARTS``) that is lost without it, or
            ``EVERYTHING``; empty: only what it gives is lost.
        since: the first release that has it. Earlier ones miss nothing; empty: all have it.

    """

    module: str
    owner: str
    method: str
    gives: str
    part: str = ""
    since: str = ""


POOL = "vllm.v1.core.block_pool", "BlockPool"
MANAGER = "vllm.v1.core.kv_cache_manager", "KVCacheManager"
SCHEDULER = "vllm.v1.core.sched.scheduler", "Scheduler"
WORKER = "vllm.v1.worker.gpu_worker", "Worker"
RUNNER = "vllm.v1.worker.gpu_model_runner", "GPUModelRunner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner", "GPUModelRunner"
ROUTER = "vllm.model_executor.layers.fused_moe.router.base_router", "BaseRouter"
GRAPH = "torch.cuda", "CUDAGraph"
"""Classes whose methods are watched: module and name."""

TARGETS: tuple[Target, ...] = (
    Target(*POOL, "get_new_blocks", "allocations and evictions", "blocks"),
    Target(*POOL, "touch", "reuse", "blocks"),
    Target(*POOL, "free_blocks", "frees", "blocks"),
    Target(*POOL, "cache_full_blocks", "which contents are cached", "blocks"),
    Target(*POOL, "get_num_free_blocks", "usage", "blocks"),
    Target(*POOL, "reset_prefix_cache", "resets of the prefix cache"),
    Target(*POOL, "evict_blocks", "explicit evictions", since="0.13"),
    Target(*POOL, "cache_partial_block", "contents that end inside a block", since="0.24"),
    Target(*POOL, "move_block_hashes", "contents that move to another block", since="0.26"),
    Target(*POOL, "unpin_blocks", "frees of pinned blocks", since="0.30"),
    Target(*MANAGER, "free", "which request frees blocks, for all kv_cache tables", "frees"),
    Target(*MANAGER, "get_computed_blocks", "prefix-cache lookups", "lookups"),
    Target(
        *MANAGER,
        "get_computed_blocks_for_connector",
        "lookups of hybrid models with a connector",
        since="0.27",
    ),
    Target(*MANAGER, "pop_blocks_for_free", "blocks that are parked", since="0.24"),
    Target(*SCHEDULER, "schedule", "steps", EVERYTHING),
    Target(*SCHEDULER, "update_from_output", "first tokens, and usage between steps", "updates"),
    Target(*SCHEDULER, "add_request", "arrivals", "requests"),
    Target(*SCHEDULER, "_free_request", "ends of requests", "requests"),
    Target(*SCHEDULER, "finish_requests", "aborts", "requests"),
    Target(*GRAPH, "capture_begin", "captures of CUDA graphs", "graphs"),
    Target(*GRAPH, "capture_end", "captures of CUDA graphs", "graphs"),
    Target(*GRAPH, "replay", "replays of CUDA graphs", "graphs"),
    Target(*RUNNER, "execute_model", "executions", "executions"),
    Target(*RUNNER, "_dummy_run", "which executions are dummies"),
    Target(
        *RUNNER,
        "_determine_batch_execution_and_padding",
        "padding of batches that run eagerly",
        since="0.12",
    ),
    Target(*RUNNER, "profile_cudagraph_memory", "which captures are trials", since="0.18"),
    Target(*RUNNER, "capture_model", "graph memory as vLLM finds it"),
    Target(*RUNNER_V2, "execute_model", "executions", "executions", since="0.12"),
    Target(*RUNNER_V2, "_dummy_run", "which executions are dummies", since="0.12"),
    Target(*RUNNER_V2, "profile_cudagraph_memory", "which captures are trials", since="0.18"),
    Target(*RUNNER_V2, "capture_model", "graph memory as vLLM finds it", since="0.12"),
    Target(*ROUTER, "_compute_routing", "which experts are used", "experts", since="0.15.1"),
    Target(*WORKER, "determine_available_memory", "memory at start-up"),
    Target(*WORKER, "initialize_from_config", "memory of the KV cache"),
    Target(*WORKER, "compile_or_warm_up_model", "which executions are warm-up"),
)


def release(version: str) -> tuple[int, ...]:
    """A release's numbers, as far as they go.

    >>> release("0.28.1+cpu"), release("0.33")
    ((0, 28, 1), (0, 33))
    """
    matched = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in matched[0].split(".")) if matched else ()


def expected(version: str) -> list[Target]:
    """The targets that this release of vLLM has; all of them for a version without a number."""
    numbers = release(version)
    return [target for target in TARGETS if not numbers or numbers >= release(target.since)]


def attached_and_missing(
    owners: Mapping[tuple[str, str], Sequence[Any]], version: str
) -> dict[str, Any]:
    """Which targets are watched on the objects that run, and which these lack.

    Args:
        owners: by a target's class, the objects in its place.
        version: vLLM's.

    Returns:
        ``attached``: names of watched methods; ``missing``: by name, what is lost without each.

    """
    attached: set[str] = set()
    missing: dict[str, str] = {}
    for target in expected(version):
        for instance in owners.get((target.module, target.owner), ()):
            name = f"{type(instance).__qualname__}.{target.method}"
            method = getattr(instance, target.method, None)
            if method is None:
                missing[name] = target.gives
            elif is_hook(method):
                attached.add(name)
    return {"attached": sorted(attached), "missing": missing}
