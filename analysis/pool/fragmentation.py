# SPDX-License-Identifier: Apache-2.0
"""Which share of the slots in held blocks has no token, and what would it be in other blocks?

The last block of a request is partly empty. Operating systems call this internal fragmentation;
section 3.1 of the PagedAttention paper (arXiv 2309.06180) measures it for KV caches. Requests
share full blocks only, so the empty slots of a request are its own.

At the end of each request the share is exact. Over its life it rests on two assumptions: before
the first token the whole prompt is in its blocks, and after it the request grows by one token at a
time, at an even pace, up to its last computed token. Preempted requests are left out of the share
over their lives, since their rows do not say when they held blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.pool.usable import block_size_of
from analysis.pool.usage import Usage
from analysis.tables.facts import Facts
from analysis.tables.session import Session

TABLE = "requests"
BLOCK_SIZES = (8, 16, 32, 64, 128)
"""Block sizes for which the share is computed, beside the session's own."""

_COLUMNS = (
    "timestamp",
    "input_length",
    "queue_sec",
    "first_token_sec",
    "finish_sec",
    "computed_tokens",
    "num_blocks",
    "preemptions",
)


@dataclass(frozen=True)
class Empty:
    """Slots without a token in blocks of ``block_size`` tokens, as shares of all slots (0 to 1).

    ``at_end``: at the ends of the requests. ``over_time``: over their lives, weighted by time.
    Both are None where no request counts.
    """

    block_size: int
    at_end: float | None
    over_time: float | None

    @property
    def share(self) -> float | None:
        """Over the requests' lives, or at their ends where only that is known."""
        return self.at_end if self.over_time is None else self.over_time


@dataclass(frozen=True)
class Fragmentation:
    """``requests`` that ended with blocks had ``slots`` in them, ``empty_slots`` without a token.

    ``actual``: the shares at the session's own block size; at the end it counts the blocks that
    requests really held, those ahead of time for speculation included. ``by_block_size``: the
    shares of the same requests in blocks of other sizes. ``filled_at_peak_pct``: slots of the pool
    that had a token at its peak, in percent, if the share over time holds there.
    """

    requests: int
    slots: int
    empty_slots: int
    actual: Empty
    by_block_size: tuple[Empty, ...]
    filled_at_peak_pct: float | None


def measure(session: Session, facts: Facts, usage: Usage) -> Fragmentation | None:
    """Internal fragmentation; None for several KV cache groups, or where no request ended with
    blocks.

    Raises:
        SessionError: the file cannot be read.

    """
    size = block_size_of(facts, usage)
    if size is None:
        return None
    sizes = sorted({size, *BLOCK_SIZES})
    parts = [_sums(batch, sizes) for batch in session.batches(TABLE, _COLUMNS)]
    if not parts:
        return None
    sums = pl.concat(parts).sum().row(0, named=True)
    if not sums["requests"]:
        return None
    slots = sums["blocks"] * size
    empties = {at: _empty(at, sums) for at in sizes}
    actual = Empty(size, _share(slots, sums["tokens"]), empties[size].over_time)
    share = actual.share
    return Fragmentation(
        requests=sums["requests"],
        slots=slots,
        empty_slots=max(0, slots - sums["tokens"]),
        actual=actual,
        by_block_size=tuple(empties[at] for at in BLOCK_SIZES),
        filled_at_peak_pct=_filled(usage, share),
    )


def _empty(size: int, sums: dict[str, float]) -> Empty:
    return Empty(
        size,
        _share(sums[f"slots_{size}"], sums["tokens"]),
        _share(sums[f"slot_time_{size}"], sums["token_time"]),
    )


def _share(slots: float, tokens: float) -> float | None:
    return max(0.0, 1 - tokens / slots) if slots else None


def _filled(usage: Usage, empty: float | None) -> float | None:
    if usage.combined is None or empty is None:
        return None
    return usage.combined.peak_pct * (1 - empty)


def _sums(batch: pl.DataFrame, sizes: list[int]) -> pl.DataFrame:
    """Slots and tokens of these requests: at their ends, and times the seconds of their lives."""
    tokens, prompt = pl.col("computed_tokens"), pl.col("input_length")
    admitted = pl.col("timestamp") / 1e3 + pl.col("queue_sec")
    first, end = pl.col("first_token_sec"), pl.col("finish_sec")
    held = batch.filter(pl.col("num_blocks") > 0)
    lives = held.filter((pl.col("preemptions") == 0) & first.is_not_null()).select(
        prompt=prompt,
        last=pl.max_horizontal(tokens, prompt),
        prefill=(first - admitted).clip(0),
        decode=(end - first).clip(0),
    )
    steps = pl.col("last") - pl.col("prompt")
    # A request grows through prompt + 1, prompt + 2, ... last tokens, each for the same time.
    mean = pl.when(steps > 0).then((pl.col("prompt") + 1 + pl.col("last")) / 2).otherwise("prompt")
    token_time = pl.col("prefill") * pl.col("prompt") + pl.col("decode") * mean
    times = {"token_time": token_time.sum()}
    for size in sizes:
        grown = slots_up_to(pl.col("last"), size) - slots_up_to(pl.col("prompt"), size)
        still = slots(pl.col("prompt"), size)
        mean_slots = pl.when(steps > 0).then(grown / steps).otherwise(still)
        slot_time = pl.col("prefill") * still + pl.col("decode") * mean_slots
        times[f"slot_time_{size}"] = slot_time.sum()
    at_end = held.select(
        requests=pl.len().cast(pl.Int64),
        blocks=pl.col("num_blocks").sum(),
        tokens=tokens.sum(),
        **{f"slots_{size}": slots(tokens, size).sum() for size in sizes},
    )
    return pl.concat([at_end, lives.select(**times)], how="horizontal")


def slots(tokens: pl.Expr, size: int) -> pl.Expr:
    """The slots of the blocks that so many tokens take."""
    return (tokens + size - 1) // size * size


def slots_up_to(tokens: pl.Expr, size: int) -> pl.Expr:
    """The sum of the slots of requests with 1, 2, ... and so many tokens."""
    full, rest = tokens // size, tokens % size
    return size * (size * full * (full + 1) // 2 + rest * (full + 1))
