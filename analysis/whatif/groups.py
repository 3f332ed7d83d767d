# SPDX-License-Identifier: Apache-2.0
"""Which KV cache groups does a simulated engine have?

One group of full attention needs its block size alone. All other groups are those of the session,
with what their managers need to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm

import numpy as np

from analysis.errors import RuleError, SessionError
from analysis.tables.facts import FULL_ATTENTION, Facts, Group
from analysis.whatif.ids import Ints

UNIFORM = "UniformTypeKVCacheSpecs"
WINDOWS = ("SlidingWindowSpec", "SlidingWindowMLASpec")
CHUNKS = "ChunkedLocalAttentionSpec"
STATES = "MambaSpec"
SIMULATED = (*FULL_ATTENTION, *WINDOWS, CHUNKS, STATES)
"""Kinds of groups whose managers get all that they need from a session."""

_NEEDED = {
    **dict.fromkeys(WINDOWS, ("sliding_window",)),
    CHUNKS: ("attention_chunk_size",),
    STATES: ("mamba_cache_mode", "num_speculative_blocks", "num_prefill_checkpoint_blocks"),
}
"""What the manager of a kind needs beside the block size."""


def kind(group: Group) -> str | None:
    """The kind of the group's layers."""
    return group.layer_kind if group.kind == UNIFORM else group.kind


def are_plain(groups: Sequence[Group]) -> bool:
    """Whether it is one group of full attention, or nothing else is known."""
    return not groups or (
        len(groups) == 1 and (groups[0].kind is None or kind(groups[0]) in FULL_ATTENTION)
    )


def of_session(name: str, facts: Facts) -> tuple[Group, ...]:
    """The groups to simulate; empty for one group of full attention.

    Raises:
        SessionError: a group is of a kind that is not simulated, or the session lacks something.

    """
    groups = facts.groups
    if are_plain(groups):
        return ()
    for number, group in enumerate(groups):
        problem = _problem(group)
        if problem:
            raise SessionError(
                f"{name}: its KV cache group {number} {problem}, so it cannot be simulated "
                "exactly; the fast engine (--fast) models it"
            )
    if any(group.pool for group in groups):
        raise SessionError(
            f"{name}: its KV cache groups have several block pools, and only groups that share "
            "one can be simulated exactly; the fast engine (--fast) models it"
        )
    return groups


def _problem(group: Group) -> str | None:
    found = kind(group)
    if found not in SIMULATED or not group.prefix_cacheable:
        return f"is {found or 'of an unknown kind'}, which is not simulated"
    if group.block_size is None:
        return "has no block_size in metadata.json"
    for name in _NEEDED.get(found, ()):
        if getattr(group, name) is None:
            return f"has no {name} in metadata.json"
    return None


def notes(facts: Facts, groups: Sequence[Group]) -> Iterator[str]:
    """What is not known of the groups."""
    retains = any(kind(group) in (*WINDOWS, STATES) for group in groups)
    if retains and facts.retention is None:
        yield (
            "prefix_cache_retention_interval is not recorded; simulated as if all blocks stayed "
            "cached"
        )
    capped = any(kind(group) in (*WINDOWS, CHUNKS) for group in groups)
    if capped and (facts.pipeline_parallel or 1) > 1:
        yield (
            "with pipeline stages a request may hold more blocks of a window than simulated, so "
            "requests are admitted a little too early"
        )


def block_size(groups: Sequence[Group]) -> int:
    """Tokens of the smallest block that fits a whole number of every group's blocks, as vLLM's
    scheduler counts."""
    return lcm(*(group.block_size or 1 for group in groups))


def resized(groups: tuple[Group, ...], size: int) -> tuple[Group, ...]:
    """The groups with blocks of another size.

    Raises:
        RuleError: a block of these groups can have no other size of its own.

    """
    if not groups or size == block_size(groups):
        return groups
    sizes = {group.block_size for group in groups}
    if len(sizes) > 1 or any(kind(group) == STATES for group in groups):
        shown = ", ".join(f"{group.block_size:,}" for group in groups)
        raise RuleError(
            f"--block-size {size:,}: the model's {len(groups)} KV cache groups have blocks of "
            f"{shown} tokens, which follow from each other; leave --block-size out"
        )
    return tuple(replace(group, block_size=size) for group in groups)


def least_blocks(groups: Sequence[Group], size: int, tokens: int) -> int:
    """Blocks that a request of so many tokens holds at least, in a pool of blocks of ``size`` where
    there are no ``groups``. Windows and states let go of what is behind them."""
    if not groups:
        return -(-tokens // size)
    return sum(
        -(-tokens // (group.block_size or 1)) for group in groups if kind(group) in FULL_ATTENTION
    )


def most_blocks(groups: Sequence[Group], size: int, tokens: Ints) -> Ints:
    """Blocks that requests of so many tokens hold at most, each of them. As ``least_blocks``, if
    windows and states let go of nothing."""
    sizes = [group.block_size or 1 for group in groups] or [size]
    blocks: Ints = np.sum([-(-tokens // each) for each in sizes], axis=0, dtype=np.int64)
    return blocks
