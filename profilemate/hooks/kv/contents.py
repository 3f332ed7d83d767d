# SPDX-License-Identifier: Apache-2.0
"""Do other engines hash the same contents alike, and which?

vLLM's hash of a block is that of the block before it, its tokens, and its adapter, salt and images.
The first one begins with a seed. So two engines have the same hashes where algorithm and seed are
the same. All that has to be the same is the engine's *basis*.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from profilemate.hooks.kv.facts import fact, hash_block_size, hashes_are_shared

SEED = "PYTHONHASHSEED"


def describe(scheduler: Any, pools: list[Any]) -> dict[str, str | None]:
    """For the header of the engine's journal: ``content_basis``, or ``contents_apart_because``,
    one sentence on why nothing can be compared with another engine's."""
    basis, reason = None, None
    config = scheduler.vllm_config
    is_caching = bool(config.cache_config.enable_prefix_caching)
    if is_caching and not hashes_are_shared(config):
        reason = f"vLLM hashes blocks differently in each process; set {SEED} alike on every host"
    else:
        basis = fact(lambda: _basis(scheduler, pools, is_caching=is_caching))
        if basis is None:
            reason = "how this vLLM hashes blocks is not known"
    return {"content_basis": basis, "contents_apart_because": reason}


def _basis(scheduler: Any, pools: list[Any], *, is_caching: bool) -> str:
    """The model, the block sizes, and what a chain of hashes begins with.

    Without a prefix cache no block is hashed; prompts have ids of prefixes all the same.
    """
    config = scheduler.vllm_config
    model = config.model_config
    return json.dumps(
        {
            "model": str(model.model),
            "revision": None if model.revision is None else str(model.revision),
            "block_size": hash_block_size(scheduler, pools),
            "groups": [
                int(group.kv_cache_spec.block_size)
                for group in scheduler.kv_cache_config.kv_cache_groups
            ],
            "begins": _begins(config.cache_config) if is_caching else None,
        }
    )


def _begins(cache: Any) -> str:
    """The hash that comes before a prompt's first one, as vLLM makes it: it differs where the
    algorithm or the seed does."""
    # Computed as vLLM does, and not read: some releases set it when the scheduler is there already.
    hashing = sys.modules.get("vllm.utils.hashing") or sys.modules["vllm.utils"]
    utils = sys.modules["vllm.v1.core.kv_cache_utils"]
    algorithm = str(cache.prefix_caching_hash_algo)
    seed = os.environ.get(SEED)
    if seed is None:
        seed = utils.DEFAULT_NONE_HASH_SEED
    begins = hashing.get_hash_fn_by_name(algorithm)(seed)
    return f"{algorithm} {bytes(begins).hex()}"
