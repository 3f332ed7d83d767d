# SPDX-License-Identifier: Apache-2.0
"""How many blocks can requests hold, and how many tokens does each of them hold?"""

from __future__ import annotations

from analysis.pool.usage import Usage, blocks_by_engine
from analysis.tables.facts import FULL_ATTENTION, Facts


def block_size_of(facts: Facts, usage: Usage) -> int | None:
    """Tokens in a block, where a request needs a block for each so many of its tokens.

    None for a model with several KV cache groups or pools, or with another kind of attention than
    full attention.
    """
    if len(facts.groups) != 1 or any(pool.pool for pool in usage.pools):
        return None
    group = facts.groups[0]
    return group.block_size if group.kind in FULL_ATTENTION else None


def usable_blocks(facts: Facts, usage: Usage) -> dict[int, int]:
    """Blocks that requests can hold, by engine.

    An engine without a row in kv_cache_usage.csv has the configured pool, less its null block.
    """
    seen = blocks_by_engine(usage)
    if facts.pool_blocks is None:
        return seen
    return {**dict.fromkeys(facts.engines, facts.pool_blocks - 1), **seen}
