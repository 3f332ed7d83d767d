# SPDX-License-Identifier: Apache-2.0
"""What was evicted, how fast, why, and was it a loss?

An eviction is *regretted* if its content was asked for again in the session: by a lookup that
missed it because of this eviction, as ``analysis.prefix.misses`` finds. It was *no loss* if another
block still held the same content. All others were *harmless* as far as the session tells:
nothing that ended in it asked again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from analysis.pool.usage import Usage
from analysis.stats.grouping import in_runs
from analysis.stats.spread import Spread, spread
from analysis.tables.facts import Facts
from analysis.tables.session import Session

TABLE = "kv_cache_evictions"
COLUMNS = (
    "timestamp_sec",
    "reason",
    "origin",
    "reuse_count",
    "copies_left",
    "evictable_sec",
    "owner_request",
    "evicting_request",
    "engine",
    "group",
)
_KEYS = ("engine", "group", "reason", "origin")
_COUNTS = ("blocks", "never_reused", "copies_left")
_SUMS = (*_COUNTS, "kept")
_BINS = 120


@dataclass(frozen=True)
class Evicted:
    """Cached blocks that lost their content.

    ``never_reused``: no request ever found them (their reuse_count is 0). ``copies_left``: other
    blocks still held the same content, so nothing was lost. ``tokens`` and ``never_reused_tokens``
    are what the blocks have room for, None where a group's block size is not known.
    """

    blocks: int
    never_reused: int
    copies_left: int
    tokens: int | None = None
    never_reused_tokens: int | None = None


@dataclass(frozen=True)
class Regret:
    """The evictions whose content was asked for again.

    ``blocks``: how many; ``share`` of all, from 0 to 1. ``requests``: that asked, and had to
    compute ``recomputed_tokens`` because of it. ``after``: from the eviction until it was first
    asked for.
    """

    blocks: int
    share: float | None
    requests: int
    recomputed_tokens: int
    after: Spread


@dataclass(frozen=True)
class Interval:
    """Evictions from ``begin_sec`` on, for the width of ``Rate``'s bins."""

    begin_sec: float
    blocks: int
    regretted: int


@dataclass(frozen=True)
class Rate:
    """Evictions over time.

    ``mean_per_sec``: since the pool's first use, warm-up left out. ``peak_per_sec``: in the whole
    second with the most, which began at ``peak_sec``. ``intervals``: at most 120, each
    ``width_sec`` wide, 1, 2 or 5 times a power of ten; those without an eviction are left out.
    """

    mean_per_sec: float | None
    peak_per_sec: int
    peak_sec: float | None
    width_sec: float
    intervals: tuple[Interval, ...]


@dataclass(frozen=True)
class Reused:
    """``blocks`` that had been found from ``least`` to ``most`` times when they were evicted;
    ``most`` is None in the last row."""

    least: int
    most: int | None
    blocks: int


@dataclass(frozen=True)
class Evictions:
    """All evictions, and the same by reason, by what the content was, by engine and by KV cache
    group. ``regretted`` and ``harmless`` (blocks) leave copies out."""

    total: Evicted
    by_reason: Mapping[str, Evicted]
    by_origin: Mapping[str, Evicted]
    by_engine: Mapping[int, Evicted]
    by_group: Mapping[int, Evicted]
    reuse_counts: tuple[Reused, ...]
    rate: Rate
    regretted: Regret
    harmless: int


_MANY = 200_000
_REUSE_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64)


@dataclass
class EvictionTally:
    """The evictions seen so far, from ``begin_sec`` on, summed up."""

    begin_sec: float
    sums: list[pl.DataFrame] = field(default_factory=list)
    seconds: list[pl.DataFrame] = field(default_factory=list)
    reuses: list[pl.DataFrame] = field(default_factory=list)
    evictors: list[pl.DataFrame] = field(default_factory=list)
    owners: list[pl.DataFrame] = field(default_factory=list)
    runs: list[pl.DataFrame] = field(default_factory=list)
    """Not summed up yet."""

    def add(self, batch: pl.DataFrame) -> None:
        rows = batch.with_columns(
            pl.col("group").fill_null(0), second=pl.col("timestamp_sec").cast(pl.Int64)
        )
        since = pl.col("timestamp_sec") - self.begin_sec
        # What was evicted while it was held had not been kept at all.
        kept = pl.when(pl.col("evictable_sec") > since).then(since).otherwise("evictable_sec")
        self.runs.append(
            in_runs(
                rows,
                [*_KEYS, "second", "evicting_request", "owner_request"],
                kept=kept.sum(),
                blocks=pl.len().cast(pl.Int64),
                never_reused=(pl.col("reuse_count") == 0).sum().cast(pl.Int64),
                copies_left=(pl.col("copies_left") > 0).sum().cast(pl.Int64),
            )
        )
        # Much faster than to group the rows, of which there are few different ones.
        counts = batch["reuse_count"].value_counts(name="blocks").cast({"blocks": pl.Int64})
        self._keep(self.reuses, counts)
        if sum(part.height for part in self.runs) > _MANY:
            self._sum_up()

    def _sum_up(self) -> None:
        if not self.runs:
            return
        runs, blocks = pl.concat(self.runs), pl.col("blocks").sum()
        self.runs.clear()
        self._keep(self.sums, runs.group_by(_KEYS).agg(pl.col(_COUNTS).sum()))
        self._keep(self.seconds, runs.group_by("second").agg(blocks))
        self._keep(self.evictors, runs.group_by("engine", "evicting_request").agg(blocks))
        owner = pl.col("owner_request").fill_null("").alias("request_id")
        self._keep(self.owners, runs.group_by("engine", owner).agg(pl.col("kept").sum()))

    def by_evictor(self) -> pl.DataFrame:
        """``blocks`` that each ``engine`` and ``evicting_request`` evicted."""
        self._sum_up()
        empty = pl.DataFrame(
            schema={"engine": pl.Int64, "evicting_request": pl.String, "blocks": pl.Int64}
        )
        return _summed([empty, *self.evictors])

    def kept_by_owner(self) -> pl.DataFrame:
        """For how many block-seconds what was evicted had been ``kept`` without a holder, by
        ``engine`` and ``request_id``, the last holder's; empty where that is not known."""
        self._sum_up()
        empty = pl.DataFrame(
            schema={"engine": pl.Int64, "request_id": pl.String, "kept": pl.Float64}
        )
        return _summed([empty, *self.owners])

    def result(
        self, session: Session, facts: Facts, usage: Usage, missed: pl.DataFrame
    ) -> Evictions:
        """The answers; ``missed`` is what ``missed_for_capacity`` found."""
        self._sum_up()
        sums = _summed([_NOTHING, *self.sums]).with_columns(
            pl.col("origin").fill_null("unknown"), tokens=_block_size(facts)
        )
        missed = (
            missed.lazy()
            .select("eviction", "evicted_sec", "timestamp_sec", "lookup", "block_size")
            .filter(pl.col("evicted_sec") >= session.begin_sec)
            .collect()
        )
        first = _first_missed(missed)
        total = _evicted(sums)
        regretted = _regret(missed, first, total.blocks)
        return Evictions(
            total=total,
            by_reason=_split(sums, "reason"),
            by_origin=_split(sums, "origin"),
            by_engine=dict(sorted(_split(sums, "engine").items())),
            by_group=dict(sorted(_split(sums, "group").items())),
            reuse_counts=self._reuse_counts(),
            rate=self._rate(first, usage.observed_sec or session.end_sec - session.begin_sec),
            regretted=regretted,
            harmless=total.blocks - total.copies_left - regretted.blocks,
        )

    def _keep(self, parts: list[pl.DataFrame], part: pl.DataFrame) -> None:
        parts.append(part)
        if len(parts) == 64:
            parts[:] = [_summed(parts)]

    def _reuse_counts(self) -> tuple[Reused, ...]:
        if not self.reuses:
            return ()
        # In the row of the highest bound that is not above it.
        bound = pl.sum_horizontal(pl.col("reuse_count") >= least for least in _REUSE_BOUNDS)
        reuses = _summed(self.reuses).group_by(bound.alias("row")).agg(pl.col("blocks").sum())
        blocks = dict(reuses.iter_rows())
        most = [*(least - 1 for least in _REUSE_BOUNDS[1:]), None]
        counts = [
            Reused(least, last, blocks.get(row, 0))
            for row, (least, last) in enumerate(zip(_REUSE_BOUNDS, most, strict=True), 1)
        ]
        while counts and not counts[-1].blocks:
            counts.pop()
        return tuple(counts)

    def _rate(self, first: pl.DataFrame, observed: float) -> Rate:
        seconds = _summed([_NO_SECONDS, *self.seconds]).sort("second")
        total = int(seconds["blocks"].sum())
        mean = total / observed if observed > 0 else None
        if not total:
            return Rate(mean, 0, None, 1.0, ())
        peak = seconds.sort("blocks", "second", descending=[True, False]).row(0, named=True)
        width = _width(int(seconds["second"][-1]) + 1 - int(seconds["second"][0]))
        lost = first.select(begin=pl.col("evicted_sec").floor().cast(pl.Int64) // width * width)
        intervals = (
            seconds.group_by(begin=pl.col("second") // width * width)
            .agg(pl.col("blocks").sum())
            .join(lost.group_by("begin").agg(regretted=pl.len()), on="begin", how="left")
            .with_columns(pl.col("begin").cast(pl.Float64), pl.col("regretted").fill_null(0))
            .sort("begin")
        )
        return Rate(
            mean_per_sec=mean,
            peak_per_sec=peak["blocks"],
            peak_sec=float(peak["second"]),
            width_sec=float(width),
            intervals=tuple(Interval(*row) for row in intervals.iter_rows()),
        )


_NOTHING = pl.DataFrame(
    schema={
        "engine": pl.Int64,
        "group": pl.Int64,
        "reason": pl.String,
        "origin": pl.String,
        **dict.fromkeys(_COUNTS, pl.Int64),
    }
)
_NO_SECONDS = pl.DataFrame(schema={"second": pl.Int64, "blocks": pl.Int64})


def missed_for_capacity(classified: pl.DataFrame, asked: pl.DataFrame) -> pl.DataFrame:
    """The blocks that were missed because their content had been evicted.

    Columns: of those of ``analysis.prefix.misses.classify`` what tells the block and its eviction,
    and of the lookup its ``engine`` and ``block_size``.
    """
    return (
        classified.lazy()
        .filter(pl.col("reason") == "capacity")
        .select(
            *("lookup", "timestamp_sec", "index", "key", "piece"),
            *("evicted_sec", "eviction", "evicting_request"),
        )
        .join(asked.lazy().select("lookup", "engine", "block_size"), on="lookup")
        .collect()
    )


def _first_missed(missed: pl.DataFrame) -> pl.DataFrame:
    """Of each eviction the first block that was missed because of it."""
    # They come almost sorted, so this is faster than to group them.
    rows = missed.select("eviction", "evicted_sec", "timestamp_sec").sort(
        "eviction", "timestamp_sec"
    )
    return rows.filter(pl.col("eviction").ne_missing(pl.col("eviction").shift(1)))


def _regret(missed: pl.DataFrame, first: pl.DataFrame, blocks: int) -> Regret:
    return Regret(
        blocks=first.height,
        share=first.height / blocks if blocks else None,
        requests=missed["lookup"].n_unique(),
        recomputed_tokens=int(missed["block_size"].sum()),
        after=spread(first["timestamp_sec"] - first["evicted_sec"]),
    )


def _block_size(facts: Facts) -> pl.Expr:
    sizes = {number: group.block_size for number, group in enumerate(facts.groups)}
    return pl.col("group").replace_strict(sizes, default=None, return_dtype=pl.Int64)


def _summed(parts: list[pl.DataFrame]) -> pl.DataFrame:
    counts = [name for name in parts[0].columns if name in _SUMS]
    return pl.concat(parts).group_by(pl.exclude(counts)).agg(pl.col(counts).sum())


def _evicted(sums: pl.DataFrame) -> Evicted:
    blocks, never_reused, copies_left = sums.select(_COUNTS).sum().row(0)
    if sums["tokens"].null_count():
        return Evicted(blocks, never_reused, copies_left)
    tokens = (int((sums[name] * sums["tokens"]).sum()) for name in ("blocks", "never_reused"))
    return Evicted(blocks, never_reused, copies_left, *tokens)


def _split(sums: pl.DataFrame, key: str) -> dict[Any, Evicted]:
    parts = {name: _evicted(part) for (name,), part in sums.group_by(key)}
    return dict(sorted(parts.items(), key=lambda part: (-part[1].blocks, part[0])))


def _width(seconds: int) -> int:
    """Whole seconds that a bin is wide: 1, 2 or 5 times a power of ten."""
    width = 1
    while (seconds + width - 1) // width + 1 > _BINS:
        width = width * 5 // 2 if str(width)[0] == "2" else width * 2
    return width
