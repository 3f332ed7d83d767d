# SPDX-License-Identifier: Apache-2.0
"""In which mode did the model run over time, how much of it was padding, and how large were the
batches?

Dummy executions are left out. An execution that replayed no graph ran eagerly, whatever its mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from analysis.gpu.executions import NONE, TABLE
from analysis.series.bins import Bins
from analysis.tables.session import Session

_PARTS = 32
"""Each doubling of the size has so many parts; up to twice as many tokens each size is a part. So
there are some hundreds of parts at most. A part ends at a multiple of its width, as capture sizes
do."""


@dataclass(frozen=True)
class BatchSize:
    """Executions with ``from_tokens`` to ``to_tokens`` unpadded tokens, by mode, and the tokens of
    ``padding`` in their graphs."""

    from_tokens: int
    to_tokens: int
    by_mode: Mapping[str, int]
    padding: int


@dataclass(frozen=True)
class ExecutionSeries:
    """All workers together. ``rate``: executions a second in each bin, by mode, eager ones
    (``NONE``) last. ``padding``: the share of padding in the tokens that graphs computed in each
    bin, from 0 to 1, None where no graph ran. ``batches``: by size, without those of no token.
    """

    rate: Mapping[str, tuple[float, ...]]
    padding: tuple[float | None, ...]
    batches: tuple[BatchSize, ...]


def measure(session: Session, bins: Bins) -> ExecutionSeries:
    """The executions of all workers.

    Raises:
        SessionError: the table cannot be read.

    """
    mode, tokens = pl.col("runtime_mode"), pl.col("unpadded_tokens")
    in_graph = (mode != NONE) & (pl.col("num_graphs").fill_null(1) > 0)
    rows = session.collect(
        TABLE,
        lambda table: (
            table.filter(pl.col("dummy") == 0)
            .group_by(
                bins.of(pl.col("timestamp_sec")),
                *_span(tokens),
                mode=pl.when(in_graph).then(mode).otherwise(pl.lit(NONE)),
            )
            .agg(
                executions=pl.len().cast(pl.Int64),
                computed=pl.when(in_graph).then(pl.max_horizontal("num_tokens", tokens)).sum(),
                padding=pl.when(in_graph).then((pl.col("num_tokens") - tokens).clip(0)).sum(),
            )
        ),
    )
    by_mode = rows.group_by("mode", "bin").agg(pl.col("executions").sum() / bins.width_sec)
    computed = bins.dense(rows.group_by("bin").agg(pl.col("computed", "padding").sum()))
    share = pl.when(pl.col("computed") > 0).then(pl.col("padding") / pl.col("computed"))
    return ExecutionSeries(
        rate={
            name: _dense(bins, by_mode.filter(pl.col("mode") == name).drop("mode"))
            for name in _modes(rows)
        },
        padding=tuple(computed.select(share).to_series().to_list()),
        batches=_batches(rows),
    )


def _span(tokens: pl.Expr) -> tuple[pl.Expr, pl.Expr]:
    """The smallest and the largest size in the same part; null for no token."""
    some = pl.when(tokens > 0).then(tokens)
    # Logarithms are not exact at powers of two, and half a token less is none.
    doubled = pl.lit(2.0).pow((some - 0.5).log(2).floor())
    width = (doubled / _PARTS).clip(1)
    end = (some / width).ceil() * width
    return (
        (end - width + 1).cast(pl.Int64).alias("from_tokens"),
        end.cast(pl.Int64).alias("to_tokens"),
    )


def _modes(rows: pl.DataFrame) -> list[str]:
    modes = rows.select(pl.col("mode").unique()).sort(pl.col("mode") == NONE, "mode")
    return modes.to_series().to_list()


def _dense(bins: Bins, by_bin: pl.DataFrame) -> tuple[float, ...]:
    return tuple(bins.dense(by_bin)["executions"].fill_null(0.0).to_list())


def _batches(rows: pl.DataFrame) -> tuple[BatchSize, ...]:
    found: dict[tuple[int, int], tuple[dict[str, int], int]] = {}
    sizes = (
        rows.drop_nulls("to_tokens")
        .group_by("from_tokens", "to_tokens", "mode")
        .agg(pl.col("executions", "padding").sum())
    )
    for begin, end, mode, executions, padding in sizes.sort("from_tokens", "mode").iter_rows():
        by_mode, padded = found.get((begin, end), ({}, 0))
        found[begin, end] = {**by_mode, mode: executions}, padded + padding
    return tuple(BatchSize(*span, *counted) for span, counted in found.items())
