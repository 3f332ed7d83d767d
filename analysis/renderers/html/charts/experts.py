# SPDX-License-Identifier: Apache-2.0
"""Which experts of an MoE model are used, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.gpu.experts import Experts, Layer, Pair
from analysis.renderers.html.chart import Chart, Table, axis
from analysis.renderers.html.report import Report
from analysis.wording.formats import share


def charts(report: Report) -> Iterator[Chart]:
    """None where nothing was counted."""
    experts = report.summary.experts
    if experts.layers:
        yield _by_layer(experts)
    if experts.pairs:
        yield _pairs(experts.pairs)


def _by_layer(experts: Experts) -> Chart:
    layers = experts.layers
    uneven = max(layers, key=lambda layer: layer.max_over_mean)
    unused = sum(layer.unused for layer in layers)
    words = (
        f"The busiest expert of a layer has {experts.mean_max_over_mean:.2f} times the mean, on "
        f"average over {len(layers):,} layers; most in layer {uneven.layer}, where expert "
        f"{uneven.busiest} has {uneven.max_over_mean:.2f} times the mean. "
        f"{unused:,} experts got no token."
    )
    width = max(len(layer.by_expert) for layer in layers)
    figure = {
        "data": [
            {
                "type": "heatmap",
                "x": list(range(width)),
                "y": [f"layer {layer.layer}" for layer in layers],
                "z": [_beside_mean(layer) for layer in layers],
                "zmin": 0,
                "zmax": round(max(2.0, uneven.max_over_mean), 3),
                "colorscale": [
                    [0, "var(--free)"],
                    [0.5, "var(--cached)"],
                    [1, "var(--held)"],
                ],
                "colorbar": {
                    "title": {"text": "tokens / mean of the layer", "side": "right"},
                    "thickness": 12,
                    "outlinewidth": 0,
                },
                "hovertemplate": "%{y}, expert %{x}: %{z} times the mean<extra></extra>",
            }
        ],
        "layout": {
            "xaxis": axis("expert", showgrid=False),
            "yaxis": {"autorange": "reversed", "showgrid": False, "automargin": True},
        },
    }
    head = ("Layer", "tokens", "busiest", "has", "/ mean", "CV", "Gini", "unused", "moved")
    return Chart(
        "experts",
        "Which experts are used?",
        "A bright column in a row is an expert that gets more than its share; empty cells are "
        "experts that nobody uses.",
        words,
        figure,
        Table(head, [_row(layer) for layer in layers]),
        height=max(320, min(900, 120 + 14 * len(layers))),
    )


def _beside_mean(layer: Layer) -> list[float]:
    mean = sum(layer.by_expert) / len(layer.by_expert)
    return [round(count / mean, 3) if mean else 0.0 for count in layer.by_expert]


def _row(layer: Layer) -> tuple[str, ...]:
    return (
        f"{layer.layer}",
        f"{layer.tokens:,}",
        f"{layer.busiest}",
        share(layer.busiest_share),
        f"{layer.max_over_mean:.2f}",
        f"{layer.cv:.2f}",
        f"{layer.gini:.2f}",
        f"{layer.unused:,}",
        "n/a" if layer.moved_share is None else share(layer.moved_share),
    )


def _pairs(pairs: tuple[Pair, ...]) -> Chart:
    first = pairs[0]
    words = (
        f"In layer {first.layer}, experts {first.expert} and {first.other_expert} got "
        f"{first.tokens:,} tokens together, {first.ratio:.2f} times what chance explains."
    )
    rows = [
        (
            f"{pair.layer}: {pair.expert}, {pair.other_expert}",
            f"{pair.tokens:,}",
            share(pair.share),
            f"{pair.expected_tokens:,.1f}",
            f"{pair.ratio:.2f}",
        )
        for pair in pairs
    ]
    labels = [f"layer {pair.layer}: {pair.expert}, {pair.other_expert}" for pair in pairs]
    figure = {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": labels,
                "x": values,
                "marker": {"color": colour},
            }
            for name, values, colour in (
                ("together", [pair.tokens for pair in pairs], "var(--held)"),
                (
                    "by chance",
                    [round(pair.expected_tokens, 1) for pair in pairs],
                    "var(--cached)",
                ),
            )
        ],
        "layout": {
            "xaxis": axis("tokens"),
            "yaxis": {"autorange": "reversed", "automargin": True},
            "barmode": "group",
        },
    }
    return Chart(
        "expert-pairs",
        "Which experts come together more often than by chance?",
        "Pairs with far more tokens than chance explains: on one GPU, they would spare tokens a "
        "way.",
        words,
        figure,
        Table(("Layer: pair", "tokens", "of all", "by chance", "ratio"), rows),
        height=max(320, 90 + 26 * len(pairs)),
    )
