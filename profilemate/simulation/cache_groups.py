# SPDX-License-Identifier: Apache-2.0
"""How does a scheduler get the KV cache groups of a session?

What a block takes in bytes is left out: it decides how many blocks there are, and that is known.
"""

from __future__ import annotations

from typing import Any

from analysis.tables.facts import FULL_ATTENTION, Group
from analysis.whatif.configuration import Configuration
from analysis.whatif.groups import CHUNKS, STATES, kind
from profilemate.simulation import parts


def arguments(configuration: Configuration) -> dict[str, Any]:
    """What ``parts.build_scheduler`` needs for the groups; nothing for one of full attention."""
    groups = configuration.groups
    if not groups:
        return {}
    modes = [group.mamba_cache_mode for group in groups if group.mamba_cache_mode is not None]
    checkpoints = {"enable_mamba_shared_prefix_checkpoint": True}
    return {
        "specs": [_spec(group) for group in groups],
        "hash_block_size": configuration.hash_block_size,
        "eagle_groups": [at for at, group in enumerate(groups) if group.is_eagle_group],
        "retention_interval": configuration.retention_interval,
        "mamba_cache_mode": modes[0] if modes else None,
        **(checkpoints if configuration.shares_checkpoints else {}),
    }


def _spec(group: Group) -> Any:
    size, found = group.block_size or 1, kind(group)
    if found in FULL_ATTENTION:
        return parts.full_attention(size)
    if found == CHUNKS:
        return parts.chunked_local(size, group.attention_chunk_size or 1)
    if found == STATES:
        return parts.mamba(
            size,
            mamba_cache_mode=group.mamba_cache_mode,
            num_speculative_blocks=group.num_speculative_blocks,
            num_prefill_checkpoint_blocks=group.num_prefill_checkpoint_blocks,
            prefill_checkpoint_alignment=group.prefill_checkpoint_alignment,
        )
    more = {"extra_retained_tokens": group.extra_retained_tokens or 0}
    return parts.sliding_window(size, group.sliding_window or 1, **more)
