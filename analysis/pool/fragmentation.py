# SPDX-License-Identifier: Apache-2.0
"""Which share of the slots in held blocks holds no token, and what would it be in other blocks?

A request's last block is partly empty: that is internal fragmentation, as operating systems have
it (PagedAttention's paper, arXiv 2309.06180, section 3.1, measures it for KV caches). Shared
blocks are full ones, so what is empty is each request's own.

Told at each request's end, where it is exact, and over its life: from its first token to its end
a request grows by a token at a time, from its prompt to its last computed token. That this took
the same time for each is an assumption. Requests that were preempted are left out of the latter,
as when they held blocks is not in their row; before the first token the whole prompt is taken to
be there.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.pool.capacity import block_size_of
from analysis.pool.usage import Usage
from analysis.tables.facts import Facts
from analysis.tables.session import Session

TABLE = "requests"
BLOCK_SIZES = (8, 16, 32, 64, 128)
"""Those for which the share is computed, beside the session's own."""

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
    """Shares of slots without a token, from 0 to 1, in blocks of ``block_size`` tokens, at the
    requests' ends and over their lives; None where there is nothing to tell it by."""

    block_size: int
    at_end: float | None
    over_time: float | None

    @property
    def share(self) -> float | None:
        """Over the requests' lives, or at their ends where only that is known."""
        return self.at_end if self.over_time is None else self.over_time


@dataclass(frozen=True)
class Fragmentation:
    """Of ``requests`` that ended and held blocks then: ``slots`` in these, and ``empty_slots``
    that held no token. ``actual``: the shares at the session's own block size, its share at the
    end as the blocks were, ahead-of-time ones for speculation included. ``by_block_size``: what
    they would be for the same requests in blocks of other sizes. ``filled_at_peak_pct``: of all
    slots of the pool, those that held a token at its peak, if the share over time is right then.
    """

    requests: int
    slots: int
    empty_slots: int
    actual: Empty
    by_block_size: tuple[Empty, ...]
    filled_at_peak_pct: float | None


def measure(session: Session, facts: Facts, usage: Usage) -> Fragmentation | None:
    """Internal fragmentation; None where the session cannot tell: several KV cache groups, or no
    request that ended with blocks.

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
    """Slots and tokens at the ends of these requests, and times the seconds that they were held."""
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
    # While it grows a request has prompt + 1, ... last tokens, each for the same time.
    mean = pl.when(steps > 0).then((pl.col("prompt") + 1 + pl.col("last")) / 2).otherwise("prompt")
    token_time = pl.col("prefill") * pl.col("prompt") + pl.col("decode") * mean
    times = {"token_time": token_time.sum()}
    for size in sizes:
        grown = _slots_up_to(pl.col("last"), size) - _slots_up_to(pl.col("prompt"), size)
        still = _slots(pl.col("prompt"), size)
        mean_slots = pl.when(steps > 0).then(grown / steps).otherwise(still)
        slot_time = pl.col("prefill") * still + pl.col("decode") * mean_slots
        times[f"slot_time_{size}"] = slot_time.sum()
    at_end = held.select(
        requests=pl.len().cast(pl.Int64),
        blocks=pl.col("num_blocks").sum(),
        tokens=tokens.sum(),
        **{f"slots_{size}": _slots(tokens, size).sum() for size in sizes},
    )
    return pl.concat([at_end, lives.select(**times)], how="horizontal")


def _slots(tokens: pl.Expr, size: int) -> pl.Expr:
    return (tokens + size - 1) // size * size


def _slots_up_to(tokens: pl.Expr, size: int) -> pl.Expr:
    """The slots of requests of 1, 2, ... so many tokens, added up."""
    full, rest = tokens // size, tokens % size
    return size * (size * full * (full + 1) // 2 + rest * (full + 1))
