# SPDX-License-Identifier: Apache-2.0
"""Which experts of a mixture-of-experts (MoE) model are used: how much, how unevenly, together
with which, and does that change?

A *token of an expert* is a token that was routed to it: each token counts once for each expert that
it went to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from analysis.tables.metadata import part, text, whole
from analysis.tables.schema import TABLES
from analysis.tables.session import Session

TABLE = "moe_experts"
PAIRS = "moe_pairs"

MOST_PAIRS = 32
"""Pairs that are listed."""


@dataclass(frozen=True)
class Layer:
    """One MoE layer, all workers together.

    ``tokens``: routed by it. ``by_expert``: of these, tokens of each expert. The ``busiest`` expert
    has ``busiest_share`` of all tokens of experts. ``max_over_mean``: its tokens, divided by the
    mean of all experts; 1 where all have the same. ``cv``: the standard deviation of the experts'
    tokens, divided by their mean. ``gini``: from 0, all have the same, to nearly 1, one has all.
    ``unused``: experts without a token. ``moved_share``: how much of the load the experts of the
    second half of the time have that those of the first half had not, from 0 to 1; None where one
    of the halves has no tokens. ``by_rank``: tokens of each expert-parallel rank's experts; empty
    where that is not known.
    """

    layer: int
    tokens: int
    by_expert: tuple[int, ...]
    busiest: int
    busiest_share: float
    max_over_mean: float
    cv: float
    gini: float
    unused: int
    moved_share: float | None
    by_rank: tuple[int, ...]


@dataclass(frozen=True)
class Pair:
    """Two experts of a layer that got ``tokens`` together, where chance explains
    ``expected_tokens``; ``ratio`` is the one divided by the other. ``share``: of all routed tokens,
    from 0 to 1."""

    layer: int
    expert: int
    other_expert: int
    tokens: int
    expected_tokens: float
    ratio: float
    share: float


@dataclass(frozen=True)
class Experts:
    """``experts``: of a layer, ``chosen`` for each token; None where not known. ``layers``: by
    number. ``pairs``: those farthest above chance, of the whole run of the workers. The means are
    over the layers; None without any. ``ranks``: of the expert-parallel group; None without one.
    ``has_eplb``: vLLM's load balancer moves the experts. ``balancedness``: the mean load of the
    ranks divided by that of the busiest, from 0 to 1, as that balancer computes it; None where the
    loads of ranks are not known. ``problem``: why nothing was counted, or not all; None where
    all was, or nothing was asked for.
    """

    experts: int | None
    chosen: int | None
    layers: tuple[Layer, ...]
    pairs: tuple[Pair, ...]
    mean_max_over_mean: float | None
    mean_gini: float | None
    unused_share: float | None
    ranks: int | None
    has_eplb: bool
    balancedness: float | None
    problem: str | None


def measure(session: Session) -> Experts:
    """What the workers counted after the warm-up.

    Raises:
        SessionError: a table cannot be read.

    """
    entry = part(session.metadata, "experts")
    layers = _layers(session)
    experts = sum(len(layer.by_expert) for layer in layers)
    return Experts(
        experts=whole(entry.get("experts")),
        chosen=whole(entry.get("chosen")),
        layers=layers,
        pairs=_pairs(session),
        mean_max_over_mean=_mean([layer.max_over_mean for layer in layers]),
        mean_gini=_mean([layer.gini for layer in layers]),
        unused_share=sum(layer.unused for layer in layers) / experts if experts else None,
        ranks=whole(entry.get("ranks")),
        has_eplb=entry.get("eplb") is True,
        balancedness=balancedness([layer.by_rank for layer in layers]),
        problem=text(entry.get("problem")),
    )


def balancedness(by_rank: Sequence[Sequence[int]]) -> float | None:
    """The mean load of the ranks divided by that of the busiest, both summed up over the layers, as
    ``_compute_eplb_load_stats`` of vLLM does from 0.28 on. None where a layer's loads are not
    known, or there is no load.

    >>> balancedness([[3, 1], [2, 2]])
    0.8
    """
    if not by_rank or not all(by_rank):
        return None
    busiest = sum(max(loads) for loads in by_rank)
    return sum(sum(loads) / len(loads) for loads in by_rank) / busiest if busiest else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _layers(session: Session) -> tuple[Layer, ...]:
    sums: dict[tuple[int, bool], list[int]] = {}
    routed: dict[int, int] = {}
    ranks: dict[int, list[int]] = {}
    middle = (session.begin_sec + session.end_sec) / 2
    for batch in session.batches(TABLE, list(TABLES[TABLE].columns)):
        for layer, tokens in batch.group_by("layer").agg(pl.col("tokens").sum()).iter_rows():
            routed[layer] = routed.get(layer, 0) + tokens
        for layer, is_late, counts in _added_up(batch, middle).iter_rows():
            _add(sums.setdefault((layer, is_late), []), counts)
        for layer, loads in batch.select("layer", "by_rank").drop_nulls().iter_rows():
            _add(ranks.setdefault(layer, []), list(map(int, loads.split())))
    return tuple(
        _layer(number, routed[number], sums, ranks.get(number, [])) for number in sorted(routed)
    )


def _added_up(batch: pl.DataFrame, middle: float) -> pl.DataFrame:
    """For each layer and half of the time the tokens of each expert, in order."""
    keys = ("layer", "is_late", "expert")
    return (
        batch.lazy()
        .select(
            "layer",
            is_late=pl.col("timestamp_sec") > middle,
            tokens=pl.col("by_expert").str.split(" ").cast(pl.List(pl.Int64)),
        )
        .with_columns(expert=pl.int_ranges(pl.col("tokens").list.len()))
        .explode("tokens", "expert")
        .group_by(keys)
        .agg(pl.col("tokens").sum())
        .sort(keys)
        .group_by("layer", "is_late", maintain_order=True)
        .agg("tokens")
        .collect()
    )


def _add(known: list[int], counts: Sequence[int]) -> None:
    known.extend([0] * (len(counts) - len(known)))
    for expert, count in enumerate(counts):
        known[expert] += count


def _layer(
    number: int, routed: int, sums: dict[tuple[int, bool], list[int]], ranks: Sequence[int]
) -> Layer:
    counts: list[int] = []
    halves = [sums.get((number, is_late), []) for is_late in (False, True)]
    for half in halves:
        _add(counts, half)
    total = sum(counts)
    mean = total / len(counts)
    busiest = max(range(len(counts)), key=counts.__getitem__)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    return Layer(
        layer=number,
        tokens=routed,
        by_expert=tuple(counts),
        busiest=busiest,
        busiest_share=counts[busiest] / total if total else 0.0,
        max_over_mean=counts[busiest] / mean if total else 1.0,
        cv=math.sqrt(variance) / mean if total else 0.0,
        gini=gini(counts),
        unused=counts.count(0),
        moved_share=_moved(*halves),
        by_rank=tuple(ranks),
    )


def gini(counts: Sequence[int]) -> float:
    """The Gini coefficient; 0 where there is nothing.

    >>> gini([5, 5, 5, 5]), gini([0, 0, 0, 8])
    (0.0, 0.75)
    """
    total, size = sum(counts), len(counts)
    if not total:
        return 0.0
    ranked = sum((2 * rank - size - 1) * count for rank, count in enumerate(sorted(counts), 1))
    return ranked / (size * total)


def _moved(before: Sequence[int], after: Sequence[int]) -> float | None:
    """Half of the sum of the differences of all shares (the total variation distance)."""
    if not (sum(before) and sum(after)):
        return None
    size = max(len(before), len(after))
    shares = [
        [count / sum(half) for count in (*half, *[0] * (size - len(half)))]
        for half in (before, after)
    ]
    return math.fsum(abs(one - other) for one, other in zip(*shares, strict=True)) / 2


def _pairs(session: Session) -> tuple[Pair, ...]:
    """Each worker's last report; those of workers with the same layers are added up."""
    tokens, expected = pl.col("pair_tokens"), pl.col("expected_tokens")
    rows = session.collect(
        PAIRS,
        lambda table: (
            table.filter(pl.col("timestamp_sec") == pl.col("timestamp_sec").max().over("worker"))
            .group_by("layer", "expert", "other_expert")
            .agg(tokens.sum(), expected.sum(), pl.col("routed_tokens").sum())
            .filter((expected > 0) & (tokens > expected))
            .sort(
                (tokens - expected) / expected.sqrt(),
                "layer",
                "expert",
                "other_expert",
                descending=[True, False, False, False],
            )
            .head(MOST_PAIRS)
        ),
    )
    return tuple(
        Pair(
            layer=row["layer"],
            expert=row["expert"],
            other_expert=row["other_expert"],
            tokens=row["pair_tokens"],
            expected_tokens=row["expected_tokens"],
            ratio=row["pair_tokens"] / row["expected_tokens"],
            share=row["pair_tokens"] / row["routed_tokens"] if row["routed_tokens"] else 0.0,
        )
        for row in rows.iter_rows(named=True)
    )
