# SPDX-License-Identifier: Apache-2.0
"""Which rank of the expert-parallel group has which experts of a layer, and how many tokens do they
bring it?

Without EPLB each rank has its experts for good. With EPLB they move, and may have copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Placement(NamedTuple):
    """Where experts are. ``ranks``: of the group. ``rank_of``: that of each logical expert, in
    order; None where EPLB decides."""

    ranks: int
    rank_of: tuple[int, ...] | None


def find(module: Any, experts: int) -> Placement | None:
    """How the experts of this MoE layer are placed; None where they are not divided among ranks, or
    it cannot be told.

    Args:
        module: the layer.
        experts: logical ones.

    """
    config = getattr(module, "moe_config", None)
    parallel: Any = getattr(config, "moe_parallel_config", None)
    ranks = int(getattr(parallel, "ep_size", 1))
    if ranks < 2:
        return None
    if getattr(parallel, "enable_eplb", False) or _has_eplb(module):
        return Placement(ranks, None)
    held = getattr(module, "expert_map", None)
    if held is None:
        return None
    mine = [place >= 0 for place in held.tolist()[:experts]]
    rank = int(parallel.ep_rank)
    for rank_of in (_in_a_row(experts, ranks), _in_turn(experts, ranks)):
        if mine == [each == rank for each in rank_of]:
            return Placement(ranks, rank_of)
    return None


def _has_eplb(module: Any) -> bool:
    return getattr(getattr(module, "router", None), "eplb_state", None) is not None


def _in_a_row(experts: int, ranks: int) -> tuple[int, ...]:
    """vLLM's *linear* placement: the first ranks have one more where they cannot have as many."""
    each, more = divmod(experts, ranks)
    return tuple(rank for rank in range(ranks) for _ in range(each + (rank < more)))


def _in_turn(experts: int, ranks: int) -> tuple[int, ...]:
    """vLLM's *round_robin* placement."""
    return tuple(expert % ranks for expert in range(experts))


def moving(runner: Any, layers: int) -> Any:
    """EPLB's own table, a tensor: for each of so many layers the logical expert of each physical
    one. None where there is none, or it cannot be told which is the model's and which a
    drafter's."""
    states = getattr(getattr(runner, "eplb_state", None), "model_states", {}).values()
    tables = [getattr(state, "physical_to_logical_map", None) for state in states]
    found = [table for table in tables if table is not None and len(table) == layers]
    return found[0] if len(found) == 1 else None


def by_rank(counts: Sequence[int], rank_of: Sequence[int], ranks: int) -> list[int]:
    """Tokens of each rank's experts, from those of each logical expert."""
    loads = [0] * ranks
    for count, rank in zip(counts, rank_of, strict=True):
        loads[rank] += count
    return loads


def by_rank_of_copies(counts: Sequence[int], logical: Sequence[int], ranks: int) -> list[int]:
    """The same where an expert may have copies. vLLM sends each token to one of them by its place
    in the batch, so each gets about as many; the sums are rounded.

    Args:
        counts: tokens of each logical expert.
        logical: the logical expert of each physical one, rank by rank; less than 0 for none.
        ranks: each has as many physical experts.

    """
    copies = [0] * len(counts)
    for expert in logical:
        if expert >= 0:
            copies[expert] += 1
    each = len(logical) // ranks
    return [
        round(
            sum(
                counts[expert] / copies[expert]
                for expert in logical[rank * each : (rank + 1) * each]
                if expert >= 0
            )
        )
        for rank in range(ranks)
    ]
