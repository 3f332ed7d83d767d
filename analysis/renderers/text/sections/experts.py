# SPDX-License-Identifier: Apache-2.0
"""Which experts of an MoE model are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.gpu.experts import Experts, Layer, Pair
from analysis.renderers.text.layout import Line, note, row, table
from analysis.wording.formats import share

SHOWN = 8
"""Layers and pairs that are named."""


def lines(experts: Experts) -> Iterator[Line]:
    """The section; empty where nothing is known."""
    if experts.problem is not None:
        what = "Not all was counted" if experts.layers else "Not counted"
        yield from note(f"{what}: {experts.problem}.")
    if not experts.layers:
        return
    sizes = {len(layer.by_expert) for layer in experts.layers}
    chosen = "" if experts.chosen is None else f", {experts.chosen} for each token"
    yield from row(
        "Layers", f"{len(experts.layers):,}", f"with {max(sizes):,} experts each{chosen}"
    )
    if experts.mean_max_over_mean is not None:
        yield from row(
            "Busiest / mean",
            f"{experts.mean_max_over_mean:.2f}",
            "of a layer's experts, on average over the layers",
        )
    if experts.balancedness is not None:
        yield from row("Balancedness", f"{experts.balancedness:.2f}", _balancedness(experts))
    if experts.unused_share is not None:
        unused = sum(layer.unused for layer in experts.layers)
        yield from row("Unused", share(experts.unused_share), f"{unused:,} experts of all layers")
    yield from _layers(experts.layers)
    yield from _pairs(experts.pairs)


def _balancedness(experts: Experts) -> str:
    ranks = max(len(layer.by_rank) for layer in experts.layers)
    words = f"mean load of {ranks:,} expert-parallel ranks over that of the busiest"
    return f"{words}; EPLB moves experts" if experts.has_eplb else words


def _layers(layers: Sequence[Layer]) -> Iterator[Line]:
    worst = sorted(layers, key=lambda layer: (-layer.max_over_mean, layer.layer))[:SHOWN]
    rows = [
        (
            f"Layer {layer.layer}",
            f"{layer.busiest}",
            share(layer.busiest_share),
            f"{layer.max_over_mean:.2f}",
            f"{layer.cv:.2f}",
            f"{layer.gini:.2f}",
            f"{layer.unused:,}",
            "n/a" if layer.moved_share is None else share(layer.moved_share),
        )
        for layer in sorted(worst, key=lambda layer: layer.layer)
    ]
    yield from table(("", "busiest", "has", "/ mean", "CV", "Gini", "unused", "moved"), rows)
    if len(layers) > SHOWN:
        yield from note(f"The {SHOWN} most uneven of {len(layers):,} layers.")


def _pairs(pairs: Sequence[Pair]) -> Iterator[Line]:
    if not pairs:
        return
    yield from note("Pairs of experts that come together most, against chance:")
    rows = [
        (
            f"Layer {pair.layer}: {pair.expert}, {pair.other_expert}",
            f"{pair.tokens:,}",
            share(pair.share),
            f"{pair.expected_tokens:,.0f}",
            f"{pair.ratio:.2f}",
        )
        for pair in pairs[:SHOWN]
    ]
    yield from table(("", "tokens", "of all", "by chance", "ratio"), rows)
