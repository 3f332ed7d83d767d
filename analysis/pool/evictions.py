# SPDX-License-Identifier: Apache-2.0
"""What was evicted, how fast, why, and was it a loss?

An eviction for room is *regretted* if a later lookup in the session missed its content because of
it (``analysis.prefix.misses`` finds these). A reset, or an eviction on request, is *on purpose*: no
larger pool keeps its contents, and what is missed because of it is counted by itself. An eviction
was *no loss* if another block still had the same content. All others were *harmless* as far as the
session shows: no request that ended in it asked for the content again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from analysis.pool.usage import Usage
from analysis.stats.grouping import summed_neighbours
from analysis.stats.spread import Spread, spread
from analysis.tables.facts import Facts
from analysis.tables.session import Session

TABLE = "kv_cache_evictions"

ON_PURPOSE = ("reset", "explicit")
"""By the column ``reason``, losses that a pool of any size would have had, too. A block that was
missed because of one has the same reason."""

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

    ``never_reused``: those that no request ever found (their reuse_count is 0). ``copies_left``:
    those whose content another block still had, so that nothing was lost. ``tokens`` and
    ``never_reused_tokens``: tokens that the blocks have room for, None where the block size of a
    group is not known.
    """

    blocks: int
    never_reused: int
    copies_left: int
    tokens: int | None = None
    never_reused_tokens: int | None = None


@dataclass(frozen=True)
class Regret:
    """The evictions whose content was asked for again.

    ``blocks``: how many. ``share``: of all evictions, from 0 to 1. ``requests``: how many asked
    and had to compute ``recomputed_tokens`` again. ``after``: seconds from an eviction until the
    first request asked for its content.
    """

    blocks: int
    share: float | None
    requests: int
    recomputed_tokens: int
    after: Spread


@dataclass(frozen=True)
class Interval:
    """Evictions in one of the intervals of a ``Rate``, which begins at ``begin_sec``."""

    begin_sec: float
    blocks: int
    regretted: int


@dataclass(frozen=True)
class Rate:
    """Evictions over time.

    ``mean_per_sec``: since the first use of the pool, without the warm-up. ``peak_per_sec``: in
    the second with the most evictions, which began at ``peak_sec``. ``intervals``: at most 120,
    each ``width_sec`` wide (1, 2 or 5 times a power of ten). Intervals without an eviction are
    left out.
    """

    mean_per_sec: float | None
    peak_per_sec: int
    peak_sec: float | None
    width_sec: float
    intervals: tuple[Interval, ...]


@dataclass(frozen=True)
class Reused:
    """``blocks`` that requests had found ``least`` to ``most`` times before the eviction.

    ``most`` is None in the last row.
    """

    least: int
    most: int | None
    blocks: int


@dataclass(frozen=True)
class Evictions:
    """All evictions; the same by reason, by origin of the content, by engine and by KV cache group.

    ``regretted``, ``on_purpose`` (by reason) and ``harmless`` (blocks) leave copies out. The first
    two are the evictions whose content was asked for again: those for room, and the others.
    """

    total: Evicted
    by_reason: Mapping[str, Evicted]
    by_origin: Mapping[str, Evicted]
    by_engine: Mapping[int, Evicted]
    by_group: Mapping[int, Evicted]
    reuse_counts: tuple[Reused, ...]
    rate: Rate
    regretted: Regret
    on_purpose: Mapping[str, Regret]
    harmless: int


_MANY = 200_000
_REUSE_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64)


@dataclass
class EvictionTally:
    """Sums up the evictions from ``begin_sec`` on.

    ``neighbours``: sums over neighbouring rows that are alike, not yet merged into the others.
    """

    begin_sec: float
    sums: list[pl.DataFrame] = field(default_factory=list)
    seconds: list[pl.DataFrame] = field(default_factory=list)
    reuses: list[pl.DataFrame] = field(default_factory=list)
    evictors: list[pl.DataFrame] = field(default_factory=list)
    owners: list[pl.DataFrame] = field(default_factory=list)
    neighbours: list[pl.DataFrame] = field(default_factory=list)

    def add(self, batch: pl.DataFrame) -> None:
        rows = batch.with_columns(
            pl.col("group").fill_null(0), second=pl.col("timestamp_sec").cast(pl.Int64)
        )
        since = pl.col("timestamp_sec") - self.begin_sec
        # A block that was evicted while a request held it had not been kept at all.
        kept = pl.when(pl.col("evictable_sec") > since).then(since).otherwise("evictable_sec")
        self.neighbours.append(
            summed_neighbours(
                rows,
                [*_KEYS, "second", "evicting_request", "owner_request"],
                kept=kept.sum(),
                blocks=pl.len().cast(pl.Int64),
                never_reused=(pl.col("reuse_count") == 0).sum().cast(pl.Int64),
                copies_left=(pl.col("copies_left") > 0).sum().cast(pl.Int64),
            )
        )
        # Much faster than grouping the rows: there are few different counts.
        counts = batch["reuse_count"].value_counts(name="blocks").cast({"blocks": pl.Int64})
        self._keep(self.reuses, counts)
        if sum(part.height for part in self.neighbours) > _MANY:
            self._sum_up()

    def _sum_up(self) -> None:
        if not self.neighbours:
            return
        rows, blocks = pl.concat(self.neighbours), pl.col("blocks").sum()
        self.neighbours.clear()
        self._keep(self.sums, rows.group_by(_KEYS).agg(pl.col(_COUNTS).sum()))
        self._keep(self.seconds, rows.group_by("second").agg(blocks))
        self._keep(self.evictors, rows.group_by("engine", "evicting_request").agg(blocks))
        owner = pl.col("owner_request").fill_null("").alias("request_id")
        self._keep(self.owners, rows.group_by("engine", owner).agg(pl.col("kept").sum(), blocks))

    def by_evictor(self) -> pl.DataFrame:
        """How many blocks each request evicted.

        Columns: ``engine``, ``evicting_request`` (null where no request did), ``blocks``.
        """
        self._sum_up()
        empty = pl.DataFrame(
            schema={"engine": pl.Int64, "evicting_request": pl.String, "blocks": pl.Int64}
        )
        return _summed([empty, *self.evictors])

    def kept_by_owner(self) -> pl.DataFrame:
        """How long evicted blocks had been kept before, by their last holder.

        Columns: ``engine``, ``request_id`` (of the last holder; empty where it is not known),
        ``kept`` (block-seconds without a holder), ``blocks`` (how many).
        """
        self._sum_up()
        empty = pl.DataFrame(
            schema={
                "engine": pl.Int64,
                "request_id": pl.String,
                "kept": pl.Float64,
                "blocks": pl.Int64,
            }
        )
        return _summed([empty, *self.owners])

    def result(
        self, session: Session, facts: Facts, usage: Usage, missed: pl.DataFrame
    ) -> Evictions:
        """All figures. ``missed``: what ``missed_since_evicted`` returns."""
        self._sum_up()
        sums = _summed([_NOTHING, *self.sums]).with_columns(
            pl.col("origin").fill_null("unknown"), tokens=_block_size(facts)
        )
        missed = (
            missed.lazy()
            .select("reason", "eviction", "evicted_sec", "timestamp_sec", "lookup", "block_size")
            .filter(pl.col("evicted_sec") >= session.begin_sec)
            .collect()
        )
        total = _evicted(sums)
        on_purpose = {
            reason: _regret(part, _first_missed(part), total.blocks)
            for (reason,), part in missed.group_by("reason")
            if reason in ON_PURPOSE
        }
        missed = for_room(missed)
        first = _first_missed(missed)
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
            on_purpose=dict(sorted(on_purpose.items())),
            harmless=total.blocks
            - total.copies_left
            - sum(lost.blocks for lost in (regretted, *on_purpose.values())),
        )

    def _keep(self, parts: list[pl.DataFrame], part: pl.DataFrame) -> None:
        parts.append(part)
        if len(parts) == 64:
            parts[:] = [_summed(parts)]

    def _reuse_counts(self) -> tuple[Reused, ...]:
        if not self.reuses:
            return ()
        # The row of a count is that of the highest bound that is not above it.
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


def missed_since_evicted(classified: pl.DataFrame, asked: pl.DataFrame) -> pl.DataFrame:
    """The blocks that lookups missed because their content had been evicted.

    Columns: ``lookup``, ``timestamp_sec``, ``index``, ``key``, ``stretch`` and ``reason`` of the
    missed block, ``evicted_sec``, ``eviction`` and ``evicting_request`` of the eviction, as in
    ``analysis.prefix.misses.classify``; ``engine`` and ``block_size`` (tokens) of the lookup.

    Args:
        classified: what ``analysis.prefix.misses.classify`` returns.
        asked: ``Prompts.asked`` of the session.

    """
    return (
        classified.lazy()
        .filter(pl.col("reason").is_in([_FOR_ROOM, *ON_PURPOSE]))
        .select(
            *("lookup", "timestamp_sec", "index", "key", "stretch", "reason"),
            *("evicted_sec", "eviction", "evicting_request"),
        )
        .join(asked.lazy().select("lookup", "engine", "block_size"), on="lookup")
        .collect()
    )


_FOR_ROOM = "capacity"


def for_room(missed: pl.DataFrame) -> pl.DataFrame:
    """Of what ``missed_since_evicted`` returns, the blocks whose room was needed."""
    is_for_room = missed["reason"] == _FOR_ROOM
    # Usually all are, and then millions of rows need no copy.
    return missed if is_for_room.all() else missed.filter(is_for_room)


def _first_missed(missed: pl.DataFrame) -> pl.DataFrame:
    """For each eviction the first block that a lookup missed because of it."""
    # The rows come almost sorted: sorting them is faster than grouping.
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
    """The width of a bin in whole seconds: 1, 2 or 5 times a power of ten."""
    width = 1
    while (seconds + width - 1) // width + 1 > _BINS:
        width = width * 5 // 2 if str(width)[0] == "2" else width * 2
    return width
