# SPDX-License-Identifier: Apache-2.0
"""Which expert-parallel rank gets how many tokens: against vLLM's own placement, and its own
balancedness of the same loads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.gpu.experts import balancedness
from profilemate.format.events import More
from profilemate.hooks.gpu import expert_ranks
from tests.graphs.test_experts import EXPERTS, LAYERS, Recorded, Toy, expected, step

pytestmark = pytest.mark.usefixtures("groups")

RANKS = 4
SIZES = ((8, 2), (8, 8), (10, 4), (12, 5), (256, 32))


def parallel_of(ranks: int, rank: int) -> Any:
    """An MoE layer's configuration of its ranks."""
    return SimpleNamespace(ep_size=ranks, ep_rank=rank)


def map_of(ranks: int, rank: int, experts: int, strategy: str) -> Any:
    """vLLM's own map from each expert to its place on this rank, or to -1."""
    from vllm.model_executor.layers.fused_moe import expert_map_manager

    return expert_map_manager.determine_expert_map(ranks, rank, experts, strategy)[1]


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize(("experts", "ranks"), SIZES)
def test_placement_is_vllms(experts: int, ranks: int, strategy: str) -> None:
    maps = [map_of(ranks, rank, experts, strategy) for rank in range(ranks)]
    wanted = tuple(
        next(rank for rank in range(ranks) if maps[rank][expert] >= 0) for expert in range(experts)
    )
    for rank in range(ranks):
        layer = SimpleNamespace(
            moe_config=SimpleNamespace(moe_parallel_config=parallel_of(ranks, rank)),
            expert_map=maps[rank],
        )
        found = expert_ranks.find(layer, experts)
        assert found is not None
        assert found.ranks == ranks
        assert found.rank_of == wanted


def test_a_placement_that_is_not_known() -> None:
    import torch

    layer = SimpleNamespace(
        moe_config=SimpleNamespace(moe_parallel_config=parallel_of(2, 0)),
        expert_map=torch.tensor([0, -1, -1, 1]),
    )
    assert expert_ranks.find(layer, 4) is None
    assert expert_ranks.find(SimpleNamespace(), 4) is None


def placed(toy: Toy, strategy: str | None) -> Toy:
    """The toy as the second of four ranks. Without a strategy EPLB decides."""
    for layer in toy.model:
        layer.moe_config.moe_parallel_config = parallel_of(RANKS, 1)
        held = None if strategy is None else map_of(RANKS, 1, EXPERTS, strategy)
        layer.routed_experts = SimpleNamespace(expert_map=held)
        if strategy is None:
            layer.router.eplb_state = SimpleNamespace()
            layer.router._apply_eplb_mapping = lambda ids: ids
            layer.router._validate_eplb_state = lambda: None
    return toy


def ranks_of(recorded: Recorded) -> list[list[list[int]]]:
    """Of each event the tokens of each rank's experts, by layer."""
    return [[by_rank for _, _, by_rank in layers] for _, _, layers in recorded.events(More.EXPERTS)]


def vllms_balancedness(by_rank: Any) -> float:
    """As vLLM's load balancer computes it from the tokens of each layer's ranks."""
    import torch
    from vllm.distributed.eplb import eplb_state

    mean, most = eplb_state._compute_eplb_load_stats(torch.tensor(by_rank).float())
    return float(mean / most)


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_tokens_of_ranks(tmp_path: Path, strategy: str) -> None:
    recorded = Recorded(placed(Toy(), strategy), tmp_path / "worker0.journal")
    for tokens in (16, 3, 9):
        recorded.toy.execute_model(step(tokens))
    recorded.end()
    maps = [map_of(RANKS, rank, EXPERTS, strategy) for rank in range(RANKS)]
    wanted = [
        [
            sum(count for count, place in zip(counts, held, strict=True) if place >= 0)
            for held in maps
        ]
        for counts in expected(recorded.toy)
    ]
    assert ranks_of(recorded) == [wanted]
    assert balancedness(wanted) == pytest.approx(vllms_balancedness(wanted))
    known = recorded.status()["experts"]
    assert (known["ranks"], known["eplb"]) == (RANKS, False)


def test_without_expert_parallelism_there_are_no_ranks(tmp_path: Path) -> None:
    recorded = Recorded(Toy(), tmp_path / "worker0.journal")
    recorded.toy.execute_model(step(5))
    recorded.end()
    assert ranks_of(recorded) == [[None] * LAYERS]
    assert recorded.status()["experts"]["ranks"] is None


def test_experts_that_move(tmp_path: Path) -> None:
    """The loads are those of where EPLB has the experts when they are read, copies included."""
    import torch
    from vllm.distributed.eplb.eplb_state import EplbState

    toy = placed(Toy(), None)
    physical = EplbState.build_initial_global_physical_to_logical_map(EXPERTS, 2)
    table = torch.tensor([physical] * LAYERS)
    known = SimpleNamespace(physical_to_logical_map=table)
    toy.eplb_state = SimpleNamespace(model_states={"model": known})  # type: ignore[attr-defined]
    recorded = Recorded(toy, tmp_path / "worker0.journal")
    toy.execute_model(step(16))
    assert recorded.counted.experts is not None
    recorded.counted.experts.read_all()
    first = expected(toy)
    # As a rearrangement does: the experts with copies are others, and all have moved.
    moved = [9, 9, 8, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    known.physical_to_logical_map = torch.tensor([moved] * LAYERS)
    toy.execute_model(step(16))
    recorded.end()
    second = [
        [now - then for now, then in zip(*counts, strict=True)]
        for counts in zip(expected(toy), first, strict=True)
    ]
    found = ranks_of(recorded)
    for event, (counts, places) in enumerate(((first, physical), (second, moved))):
        for layer in range(LAYERS):
            loads = [counts[layer][expert] / places.count(expert) for expert in places]
            wanted = torch.tensor(loads).reshape(RANKS, -1).sum(1)
            assert found[event][layer] == pytest.approx(wanted.tolist(), abs=0.51)
    assert recorded.status()["experts"]["eplb"] is True


def test_a_table_that_is_not_the_models(tmp_path: Path) -> None:
    import torch

    toy = placed(Toy(), None)
    table = torch.zeros((LAYERS + 1, EXPERTS), dtype=torch.int64)
    state = SimpleNamespace(physical_to_logical_map=table)
    toy.eplb_state = SimpleNamespace(model_states={"drafter": state})  # type: ignore[attr-defined]
    recorded = Recorded(toy, tmp_path / "worker0.journal")
    toy.execute_model(step(5))
    recorded.end()
    assert ranks_of(recorded) == [[None] * LAYERS]
    assert recorded.counts() == expected(toy)


@pytest.mark.parametrize("seed", range(5))
def test_balancedness_is_vllms(seed: int) -> None:
    import torch

    draw = torch.Generator().manual_seed(seed)
    by_rank = torch.randint(0, 1000, (6, 8), generator=draw).tolist()
    assert balancedness(by_rank) == pytest.approx(vllms_balancedness(by_rank))


def test_balancedness_of_nothing() -> None:
    assert balancedness([]) is None
    assert balancedness([[0, 0]]) is None
    assert balancedness([[1, 2], []]) is None
