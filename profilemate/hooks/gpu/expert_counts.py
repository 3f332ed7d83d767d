# SPDX-License-Identifier: Apache-2.0
"""Count on the device which experts tokens went to, and which pairs of them.

While the model runs, each layer's choice is only copied, to the same place each time, so that a
CUDA graph can do it, too. What was copied is counted when the execution has ended. So padding, and
whatever ran without requests, never counts. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from profilemate.hooks.gpu.expert_layers import Layer

MOST_AT_ONCE = 1 << 19
"""Numbers of eight bytes that are made at once to count with."""

PAIRS_OF_A_LAYER = 32
"""Pairs of experts that are reported of each layer: those farthest above what chance explains."""

ROUNDS = 40
"""After so many, what chance explains changes no more."""


class Counts:
    """Counts of layers with the same device.

    ``torch`` is the module; ``most_tokens`` is what a batch has at most; ``with_pairs``: count
    pairs, too. ``tokens`` counts the tokens that have been counted.
    """

    def __init__(
        self, torch: Any, device: Any, layers: Sequence[Layer], most_tokens: int, with_pairs: bool
    ) -> None:
        self.tokens = 0
        self.experts = max(layer.experts for layer in layers)
        chosen = max(layer.chosen for layer in layers)
        shape = len(layers), most_tokens, chosen
        self._torch = torch
        with torch.inference_mode(False):
            kind = torch.int16 if self.experts < 1 << 15 else torch.int32
            self._chosen = torch.full(shape, -1, dtype=kind, device=device)
            # The last place of each is for what is no expert.
            self.of_experts = torch.zeros(
                (len(layers), self.experts + 1), dtype=torch.int64, device=device
            )
            self._one = torch.ones(1, dtype=torch.int64, device=device)
            self.of_pairs = None
            if with_pairs and chosen > 1:
                self.of_pairs = torch.zeros(
                    (len(layers), self.experts**2 + 1), dtype=torch.int64, device=device
                )
                pairs = torch.combinations(torch.arange(chosen), 2).to(device)
                self._first, self._second = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
        widest = max(chosen, chosen * (chosen - 1) // 2 if self.of_pairs is not None else 0)
        self._at_once = max(1, MOST_AT_ONCE // (len(layers) * widest))

    def copy(self, layer: int, chosen: Any) -> None:
        """A layer has chosen these experts: a row for each token, those of padding last."""
        tokens, width = chosen.shape
        tokens = min(tokens, self._chosen.shape[1])
        self._chosen[layer, :tokens, :width].copy_(chosen[:tokens])

    def count(self, tokens: int) -> None:
        """Count what was copied last of so many tokens."""
        for begin in range(0, tokens, self._at_once):
            self._count(self._chosen[:, begin : min(tokens, begin + self._at_once)].long())
        self.tokens += tokens

    def _count(self, chosen: Any) -> None:
        where, experts = self._torch.where, self.experts
        # A router may choose none, or shared experts, which have numbers behind the others.
        chosen = where((chosen >= 0) & (chosen < experts), chosen, experts)
        self._add(self.of_experts, chosen)
        if self.of_pairs is not None:
            one, other = chosen[..., self._first], chosen[..., self._second]
            less, more = self._torch.minimum(one, other), self._torch.maximum(one, other)
            self._add(self.of_pairs, where(more < experts, less * experts + more, experts**2))

    def _add(self, counts: Any, places: Any) -> None:
        places = places.flatten(1)
        counts.scatter_add_(1, places, self._one.expand(places.shape))

    def strongest_pairs(self) -> Any:
        """The pairs that came together most against chance, on the device.

        Returns:
            For each layer and pair: both experts, tokens that went to both, tokens expected there,
            and tokens of each expert, as float64. Pairs that came together never have 0 tokens.

        """
        torch, experts = self._torch, self.experts
        counts = self.of_experts[:, :experts].double()
        assert self.of_pairs is not None
        pairs = self.of_pairs[:, :-1].view(-1, experts, experts)
        weights = _weights(torch, (pairs.sum(1) + pairs.sum(2)).double())
        found = []
        most = min(PAIRS_OF_A_LAYER, experts * (experts - 1) // 2)
        for layer in range(len(pairs)):
            together = pairs[layer].double()
            expected = weights[layer, :, None] * weights[layer]
            beyond = (together - expected) / expected.sqrt().clamp(min=1e-30)
            beyond = torch.where(together > 0, beyond, -torch.inf)
            places = beyond.flatten().topk(most).indices
            one, other = places // experts, places % experts
            known = together.flatten()[places], expected.flatten()[places]
            of_each = counts[layer][one], counts[layer][other]
            found.append(torch.stack([one.double(), other.double(), *known, *of_each], 1))
        return torch.stack(found)


def _weights(torch: Any, together: Any) -> Any:
    """Numbers, one an expert, of which two multiply to the tokens expected at a pair by chance.

    Each expert gets as many partners as it had, and no expert itself: quasi-independence of a table
    whose diagonal cannot be.

    Args:
        torch: the module.
        together: for each layer and expert, partners that it had, as float64.

    """
    weights = together / together.sum(1, keepdim=True).clamp(min=1).sqrt()
    for _ in range(ROUNDS):
        others = (weights.sum(1, keepdim=True) - weights).clamp(min=1e-30)
        # Halfway between two rounds: a whole one would swing from side to side.
        weights = (weights * together / others).sqrt()
    return weights


class Reading:
    """Numbers on their way from the device to the host."""

    def __init__(self, torch: Any, numbers: Any) -> None:
        self._passed: Any = None
        if numbers.device.type == "cuda":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._passed = torch.cuda.Event()
            self._passed.record()
        else:
            self._numbers = numbers.clone()

    def result(self) -> Any:
        """The numbers on the host; None where they have not arrived."""
        return self._numbers if self._passed is None or self._passed.query() else None
