# SPDX-License-Identifier: Apache-2.0
"""Which requests hold blocks, since when, and does the pool hold blocks of requests that ended?

With one group of full attention the block table of a request only grows until the request is
preempted or ends. So its blocks are all that it allocated and reused since it last freed them. A
block that several requests share counts for each of them. A request has ended once it has its row
in requests.jsonl.

Blocks leak if the pool holds more of them than the requests that have not ended. While no request
runs or waits, every held block has leaked. Where requests share blocks, the leak is at least the
difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.pool.pressure import States
from analysis.pool.usable import block_size_of
from analysis.pool.usage import Usage
from analysis.tables.facts import Facts
from analysis.tables.session import Session

TABLE = "kv_cache_allocations"
SHOWN = 10
"""How many holders, and how many suspects of a leak, are named."""


@dataclass(frozen=True)
class Holder:
    """A request and its ``blocks``, ``reused_blocks`` of them found in the prefix cache.

    ``since_sec``: when it got the first of them. ``age_sec``: how long ago that was.
    """

    request_id: str
    engine: int
    blocks: int
    reused_blocks: int
    since_sec: float
    age_sec: float


@dataclass(frozen=True)
class Suspect:
    """A request that ended at ``ended_sec`` and allocated ``blocks`` that nobody has freed.

    Where requests shared blocks, another one of them may be to blame.
    """

    request_id: str
    engine: int
    blocks: int
    ended_sec: float


@dataclass(frozen=True)
class Holders:
    """What was held at ``at_sec``.

    ``held_blocks``: by the pools' own count. ``requests``: requests that had not ended and held
    ``blocks``, shared ones counted for each; ``oldest``: some of them, the oldest first.
    ``leaked_blocks``: held beyond these, ``at_least`` so many where requests may share blocks.
    ``idle_sec``: how long no request had run or waited at ``at_sec``, None if one did.
    ``suspects``: requests that the leaked blocks may belong to, those with most blocks first.
    """

    at_sec: float
    held_blocks: int
    requests: int
    blocks: int
    oldest: tuple[Holder, ...]
    leaked_blocks: int
    at_least: bool
    idle_sec: float | None
    suspects: tuple[Suspect, ...]


class HolderTally:
    """The blocks of the requests that have not ended at a moment, the session's end by default.

    It needs every row of kv_cache_allocations.csv, those in the warm-up included.
    """

    def __init__(
        self,
        session: Session,
        facts: Facts,
        usage: Usage,
        pools: States,
        *,
        at_sec: float | None = None,
    ) -> None:
        self._session = session
        # The precision of the tables: the end of a session comes from a wall clock.
        self._at = round(session.end_sec if at_sec is None else at_sec, 6)
        micros = round(self._at * 1e6)
        states = [part.filter(pl.col("micros") <= micros) for part in pools.by_engine.values()]
        known = [part for part in states if not part.is_empty()]
        self._is_known = bool(known) and block_size_of(facts, usage) is not None
        self._held = sum(int(part["held"][-1]) for part in known)
        idle = [since for part in known if (since := _idle_since(part)) is not None]
        self._idle_sec = self._at - max(idle) if idle and len(idle) == len(known) else None
        self._ended = _ended(session, self._at)
        self._moves: list[pl.DataFrame] = []

    def add(self, batch: pl.DataFrame) -> None:
        if self._is_known:
            moves = _moves(batch.lazy(), self._at).select(*_NAME, *_MOVED)
            living = moves.join(self._ended.lazy(), on=_NAME, how="anti", maintain_order="left")
            self._moves.append(living.collect())

    def result(self) -> Holders | None:
        """The holders; None with several KV cache groups or pools, or without a usage row.

        Raises:
            SessionError: a table cannot be read.

        """
        if not self._is_known:
            return None
        at, idle_sec = self._at, self._idle_sec
        living = _living(pl.concat(self._moves), at) if self._moves else _NOBODY
        blocks = int(living["blocks"].sum())
        # While a request runs the tables must name one. While the tables are being written, they
        # do not all reach equally far.
        comparable = idle_sec is not None or (not self._session.goes_on and not living.is_empty())
        leaked = max(0, self._held - blocks) if comparable else 0
        return Holders(
            at_sec=at,
            held_blocks=self._held,
            requests=living.height,
            blocks=blocks,
            oldest=tuple(Holder(*row) for row in living.head(SHOWN).iter_rows()),
            leaked_blocks=leaked,
            at_least=int(living["reused_blocks"].sum()) > 0,
            idle_sec=idle_sec,
            suspects=_suspects(self._session, at, self._ended) if leaked else (),
        )


_NAME = ["engine", "request_id"]
_MOVED = ["timestamp_sec", "event", "num_blocks"]
COLUMNS = (*_NAME, *_MOVED)

_NOBODY = pl.DataFrame(
    schema={
        "request_id": pl.String,
        "engine": pl.Int64,
        "blocks": pl.Int64,
        "reused_blocks": pl.Int64,
        "since_sec": pl.Float64,
        "age_sec": pl.Float64,
    }
)


def measure(
    session: Session, facts: Facts, usage: Usage, pools: States, *, at_sec: float | None = None
) -> Holders | None:
    """Who held blocks at a moment, the session's end if none is given; None as for the tally.

    Raises:
        SessionError: a table cannot be read.

    """
    tally = HolderTally(session, facts, usage, pools, at_sec=at_sec)
    for batch in session.batches(TABLE, COLUMNS, history=True):
        tally.add(batch)
    return tally.result()


def _idle_since(states: pl.DataFrame) -> float | None:
    """Since when the engine has had no request, in seconds; None if it has one."""
    busy = states["idle"].fill_null(False).not_().arg_true()
    first_idle = 0 if busy.is_empty() else int(busy[-1]) + 1
    return None if first_idle == states.height else float(states["micros"][first_idle]) / 1e6


def _ended(session: Session, at: float) -> pl.DataFrame:
    """The requests that had ended by ``at``."""
    return session.collect(
        "requests",
        lambda table: table.filter(pl.col("finish_sec") <= at).select(
            "engine", "request_id", ended_sec="finish_sec"
        ),
        history=True,
    )


def _living(moves: pl.DataFrame, at: float) -> pl.DataFrame:
    """A row for each request that had not ended and held blocks, the oldest first.

    Its columns are the fields of ``Holder``.
    """
    number, event = pl.int_range(pl.len()), pl.col("event")
    since_freed = number > number.filter(event == "free").max().fill_null(-1)
    blocks, time = pl.col("num_blocks"), pl.col("timestamp_sec")
    return (
        moves.group_by("engine", "request_id", maintain_order=True)
        .agg(
            blocks=blocks.filter(since_freed).sum(),
            reused_blocks=blocks.filter(since_freed & (event == "reuse")).sum(),
            since_sec=time.filter(since_freed).min(),
        )
        .filter(pl.col("blocks") > 0)
        .sort("since_sec", "engine", "request_id")
        .select(
            "request_id",
            "engine",
            "blocks",
            "reused_blocks",
            "since_sec",
            age_sec=at - pl.col("since_sec"),
        )
    )


def _suspects(session: Session, at: float, ended: pl.DataFrame) -> tuple[Suspect, ...]:
    signed = pl.when(pl.col("event") == "free").then(-pl.col("num_blocks")).otherwise("num_blocks")
    left = session.collect(
        TABLE,
        lambda table: (
            _moves(table, at)
            .filter(pl.col("event") != "reuse")
            .join(ended.lazy(), on=["engine", "request_id"])
            .group_by("engine", "request_id")
            .agg(blocks=signed.sum(), ended_sec=pl.col("ended_sec").last())
            .filter(pl.col("blocks") > 0)
        ),
        history=True,
    ).sort("blocks", "ended_sec", descending=True)
    rows = left.head(SHOWN).select("request_id", "engine", "blocks", "ended_sec").iter_rows()
    return tuple(Suspect(*row) for row in rows)


def _moves(table: pl.LazyFrame, at: float) -> pl.LazyFrame:
    """The blocks that requests allocated, reused, held after a pause, and freed until then."""
    return table.filter(
        (pl.col("timestamp_sec") <= at)
        & pl.col("event").is_in(["allocate", "reuse", "held", "free"])
        & (pl.col("request_id").fill_null("") != "")
    )
