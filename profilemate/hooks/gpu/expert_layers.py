# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model route tokens to experts, and whether that can be counted.

Since 0.15.1 each MoE layer of vLLM's has a router, whose ``_compute_routing`` yields the experts of
each token as the model names them (the *logical* experts), before EPLB maps them to copies.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from profilemate.hooks.gpu import expert_ranks
from profilemate.hooks.gpu.expert_ranks import Placement

METHOD = "_compute_routing"
"""The router's method. It returns the weights, and the experts of each token."""

_LAYERS = "vllm.model_executor.layers.fused_moe"
"""Where the classes of vLLM's MoE layers are. On a GPU, torch.compile does not look into them."""


class UncountableError(RuntimeError):
    """Tokens cannot be counted. The text says why."""


class Layer(NamedTuple):
    """An MoE layer. ``number`` is its place in the model; ``experts`` are logical ones, of which
    each token gets ``chosen``; ``placement`` says which ranks have them, None where all have all,
    or it is not known."""

    number: int
    router: Any
    experts: int
    chosen: int
    placement: Placement | None = None


def is_moe(config: Any) -> bool:
    """Whether the model has experts, as far as its configuration says."""
    try:
        return int(config.model_config.get_num_experts()) > 0
    except Exception:
        return True


def why_not(config: Any, device: str) -> str | None:
    """Why tokens cannot be told apart that this worker routes; None where they can."""
    parallel = config.parallel_config
    if getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False):
        return "vLLM divides a batch in two (dual batch overlap)"
    if getattr(parallel, "use_sequence_parallel_moe", False):
        return "vLLM divides the tokens of MoE layers among ranks (sequence parallelism)"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "vLLM divides prompts among ranks (prefill context parallelism)"
    if device != "cuda" and _is_compiled(config.compilation_config):
        return f"vLLM compiles the model's MoE layers on {device}; --enforce-eager avoids it"
    return None


def _is_compiled(compilation: Any) -> bool:
    mode = getattr(compilation, "mode", None)
    if mode is None:
        mode = getattr(compilation, "level", None)
    return bool(mode)


def find(model: Any) -> list[Layer]:
    """The model's MoE layers, in their order. Two of its modules may have one router.

    Raises:
        UncountableError: a router cannot be counted. The text says why.

    """
    found: dict[int, Layer] = {}
    for module in model.modules():
        router: Any = getattr(module, "router", None)
        is_layer = any(kind.__module__.startswith(_LAYERS) for kind in type(module).__mro__)
        if not is_layer or not callable(getattr(router, METHOD, None)):
            continue
        if hasattr(router, "zero_expert_type"):
            raise UncountableError("the model has experts that compute nothing (zero experts)")
        if id(router) not in found:
            number = _number(module, len(found))
            experts = _experts(module, router)
            placement = _placement(module, experts)
            found[id(router)] = Layer(number, router, experts, int(router.top_k), placement)
    layers = sorted(found.values(), key=lambda layer: layer.number)
    if len({layer.number for layer in layers}) < len(layers):
        # Of two models in one, say: then only the order is left.
        layers = [layer._replace(number=number) for number, layer in enumerate(found.values())]
    return layers


def _placement(module: Any, experts: int) -> Placement | None:
    try:
        return expert_ranks.find(module, experts)
    except Exception:
        # A release that tells it in another way costs the loads of ranks, and nothing else.
        return None


def _number(module: Any, otherwise: int) -> int:
    try:
        return int(module.layer_id)
    except Exception:
        # Some releases have the number in the name alone: model.layers.3.mlp.experts.
        parts = str(getattr(module, "layer_name", "")).split(".")
        return next((int(part) for part in parts if part.isdigit()), otherwise)


def _experts(module: Any, router: Any) -> int:
    """Logical experts: without the copies that EPLB adds."""
    config = getattr(module, "moe_config", None)
    known = (
        getattr(config, "num_logical_experts", None),
        getattr(module, "logical_num_experts", None),
        getattr(config, "num_experts", None),
    )
    return next(int(each) for each in (*known, router.global_num_experts) if each is not None)


def own_rows(rows: int, rank: int) -> tuple[int, int]:
    """Which rows of a batch that is being routed are this data-parallel rank's: begin and end.

    Its tokens come first there, then its padding.

    Args:
        rows: all that the router gets.
        rank: the data-parallel rank.

    Raises:
        UncountableError: they cannot be told from other ranks' rows.

    """
    context = sys.modules["vllm.forward_context"].get_forward_context()
    if context.dp_metadata is None:
        return 0, rows
    of_ranks = context.dp_metadata.num_tokens_across_dp_cpu.tolist()
    if rows == sum(of_ranks):
        begin = sum(of_ranks[:rank])
        return begin, begin + of_ranks[rank]
    if rows == of_ranks[rank]:
        return 0, rows
    raise UncountableError(f"{rows} rows are routed where ranks have {of_ranks}")
