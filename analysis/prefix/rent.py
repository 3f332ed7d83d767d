# SPDX-License-Identifier: Apache-2.0
"""Which requests held how much of the cache for how long, and was it worth it?

Rent is blocks times seconds. A request pays for every block from its allocation or reuse until the
request ends or is preempted. A block that several requests hold costs each of them the full rent.
``Rent.shared`` says how much of the rent was paid more than once: the time for which a block that
a lookup found was still held by a request that had used it before (a preempted one counts as
holding it).

A block that no request holds and that has content is *kept*. What the pool held and kept in all is
exact, from the end of one step to the end of the next. What was kept has an owner only if it ended
in an eviction: the last request that held the block. The rest was reused, or was still there at
the end.

The rent of a single request is exact for models with one KV cache group of full attention. Other
groups free blocks while a request runs, and vLLM does not always say whose they were.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from analysis.pool import usage
from analysis.prefix.prompts import Prompts
from analysis.stats.grouping import own_text
from analysis.tables.facts import FULL_ATTENTION, Facts
from analysis.tables.session import Session

COLUMNS = ("timestamp_sec", "event", "num_blocks", "request_id", "engine")
SHOWN = 10
"""How many requests are named."""

_NAME = ["engine", "request_id"]
_HASH = pl.col("request_id").hash()
_PHASES = ("waiting", "decoding", "running", "kept")


@dataclass(frozen=True)
class Renter:
    """What one request paid, in block-seconds.

    ``waiting``: until its first token. ``decoding``: from then on. ``running``: all that a request
    paid which had not ended, so that its first token is not known. ``kept``: for the blocks that
    it left in the cache, until their eviction. ``total``: the sum. ``shared_tokens``: tokens that
    later requests found in blocks that it computed; None where it had not ended.
    """

    request_id: str
    engine: int
    waiting: float
    decoding: float
    running: float
    kept: float
    total: float
    shared_tokens: int | None


@dataclass(frozen=True)
class Rent:
    """Block-seconds over all engines.

    ``exact``: whether the rent of a single request is. ``waiting``, ``decoding`` and ``running``:
    what all requests paid, as for ``Renter``; ``shared``: the part of it that several paid for the
    same block at once. ``pool_held``: blocks that the pools held. ``pool_kept``: those that they
    kept; ``kept_until_evicted``: the part of it that ended in an eviction. ``saved_tokens``:
    prompt tokens found in the cache; ``saved_per_kept``: these by ``pool_kept``, so tokens that a
    kept block saved a second. ``renters``: how many requests paid. ``top``: those that paid most.
    """

    exact: bool
    waiting: float
    decoding: float
    running: float
    pool_held: float
    pool_kept: float
    shared: float
    kept_until_evicted: float
    saved_tokens: int
    saved_per_kept: float | None
    renters: int
    top: tuple[Renter, ...]


@dataclass
class RentTally:
    """Sums up what requests paid. It needs all allocations, those in the warm-up included.

    ``stints``: what ``analysis.requests.stints.with_lookups`` returns. ``begin_sec`` and
    ``end_sec``: of the time that counts.
    """

    stints: pl.DataFrame
    begin_sec: float
    end_sec: float
    parts: list[pl.DataFrame] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._starts = self.stints.select(
            *_NAME, "end_sec", "first_token_sec", since="begin_sec", name=_HASH
        ).sort("since")

    def add(self, batch: pl.DataFrame) -> None:
        ended = pl.col("end_sec").is_not_null()
        until = pl.col("end_sec").fill_null(self.end_sec)
        at = pl.col("timestamp_sec").clip(self.begin_sec)
        first = pl.min_horizontal(pl.col("first_token_sec").fill_null(float("inf")), until)
        before = pl.col("blocks") * (first - at).clip(0)
        after = pl.col("blocks") * (until - pl.max_horizontal(at, first)).clip(0)
        moved = (
            batch.lazy()
            .filter(
                pl.col("event").is_in(["allocate", "reuse", "held", "free"])
                & pl.col("request_id").is_not_null()
            )
            .select(
                *_NAME,
                "timestamp_sec",
                blocks=pl.when(pl.col("event") == "free")
                .then(-pl.col("num_blocks"))
                .otherwise("num_blocks"),
            )
            .collect()
        )
        # A session may have millions of requests, and a batch of rows some thousands. A hash finds
        # them faster than text does, and one too many does no harm.
        names = moved.select(_HASH).to_series().implode()
        starts = self._starts.lazy().filter(pl.col("name").is_in(names)).drop("name")
        self.parts.append(
            moved.lazy()
            .join_asof(
                starts,
                left_on="timestamp_sec",
                right_on="since",
                by=_NAME,
                check_sortedness=False,
            )
            .select(
                *_NAME,
                waiting=pl.when(ended).then(before),
                decoding=pl.when(ended).then(after),
                running=pl.when(~ended).then(before),
            )
            .group_by(_NAME)
            .agg(pl.col(_PHASES[:3]).sum())
            .with_columns(own_text())
            .collect()
        )
        if len(self.parts) == 64:
            self.parts = [self.result()]

    def result(self) -> pl.DataFrame:
        """A row for each request, with what it paid.

        Columns: ``engine``, ``request_id``, ``waiting``, ``decoding`` and ``running``, as in
        ``Renter``, in block-seconds.
        """
        empty = pl.DataFrame(
            schema={
                "engine": pl.Int64,
                "request_id": pl.String,
                **dict.fromkeys(_PHASES[:3], pl.Float64),
            }
        )
        return pl.concat([empty, *self.parts]).group_by(_NAME).agg(pl.col(_PHASES[:3]).sum())


def measure(
    session: Session,
    facts: Facts,
    prompts: Prompts,
    uses: pl.DataFrame,
    asked_again: pl.DataFrame,
    paid: RentTally,
    kept: pl.DataFrame,
) -> Rent:
    """The rent over all engines of the session.

    Args:
        session: the session.
        facts: of the session.
        prompts: of the session.
        uses: what ``analysis.prefix.reuse.uses`` returns.
        asked_again: what ``analysis.prefix.reuse.asked_again`` returns.
        paid: a tally that has seen all allocations of the session.
        kept: what ``analysis.pool.evictions.EvictionTally.kept_by_owner`` returns.

    Raises:
        SessionError: a table cannot be read.

    """
    by_request = (
        paid.result()
        .join(kept.select(*_NAME, "kept"), on=_NAME, how="full", coalesce=True)
        .with_columns(pl.col(_PHASES).fill_null(0.0))
        .with_columns(total=pl.sum_horizontal(_PHASES))
    )
    waiting, decoding, running = (float(by_request[name].sum()) for name in _PHASES[:3])
    pool_held, pool_kept = _pools(session)
    exact = [group.kind in FULL_ATTENTION for group in facts.groups] == [True]
    asked = prompts.asked.filter("in_window")
    saved = int(asked["hit_tokens"].sum())
    return Rent(
        exact=exact,
        waiting=waiting,
        decoding=decoding,
        running=running,
        pool_held=pool_held,
        pool_kept=pool_kept,
        shared=_held_twice(uses, session.begin_sec),
        kept_until_evicted=float(kept["kept"].sum()),
        saved_tokens=saved,
        saved_per_kept=saved / pool_kept if pool_kept else None,
        renters=by_request.filter((pl.col("total") > 0) & (pl.col("request_id") != "")).height,
        top=_top(by_request, prompts, asked_again),
    )


def _pools(session: Session) -> tuple[float, float]:
    """Block-seconds that all pools held, and that they kept."""
    states = session.collect(
        usage.TABLE,
        lambda table: table.select(
            "timestamp_sec", "num_blocks", "cached_blocks", "engine", "pool"
        ),
        history=True,
    )
    until = pl.col("timestamp_sec").shift(-1).over("engine", "pool").fill_null(session.end_sec)
    lasted = (until - pl.col("timestamp_sec").clip(session.begin_sec)).clip(0)
    held, kept = states.select(
        (pl.col("num_blocks") * lasted).sum(), (pl.col("cached_blocks") * lasted).sum()
    ).row(0)
    return float(held), float(kept)


def _held_twice(uses: pl.DataFrame, begin_sec: float) -> float:
    """Block-seconds for which an earlier request held a block that a lookup had found."""
    both = pl.min_horizontal("end_sec", "latest_sec") - pl.col("begin_sec").clip(begin_sec)
    counts = pl.col("found") & pl.col("latest_sec").is_not_null()
    return float(uses.select((both.clip(0) * pl.col("blocks")).filter(counts).sum()).item())


def _top(
    by_request: pl.DataFrame, prompts: Prompts, asked_again: pl.DataFrame
) -> tuple[Renter, ...]:
    top = (
        by_request.filter((pl.col("request_id") != "") & (pl.col("total") > 0))
        .sort("total", *_NAME, descending=[True, False, False])
        .head(SHOWN)
    )
    # A client may use a request id again. The last one of these requests counts.
    known = (
        prompts.asked.drop_nulls("request")
        .unique(_NAME, keep="last", maintain_order=True)
        .select(*_NAME, "request", "block_size")
        .join(top.select(_NAME), on=_NAME, how="semi")
    )
    rows = (
        top.join(known, on=_NAME, how="left")
        .join(asked_again, on="request", how="left")
        .with_columns(
            shared_tokens=pl.when(pl.col("request").is_not_null()).then(
                pl.col("found").fill_null(0) * pl.col("block_size")
            )
        )
        .sort("total", *_NAME, descending=[True, False, False])
        .select("request_id", "engine", *_PHASES, "total", "shared_tokens")
    )
    return tuple(Renter(**row) for row in rows.iter_rows(named=True))
