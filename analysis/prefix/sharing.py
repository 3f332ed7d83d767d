# SPDX-License-Identifier: Apache-2.0
"""Which prefixes do requests share, what did that save, and how much cache does it take?

A *stretch* is as many consecutive blocks of a prompt as the same requests share. Prompts that
share a system prompt and then part, some of them with the same document, have two stretches. Every
token belongs to one stretch.

The *working set* is what a cache must hold to find whatever comes back within T seconds: the
different contents of the requests that ran in the last T seconds (after P. J. Denning, "The
Working Set Model for Program Behavior", 1968). A *round* is the time after which contents come
back: the median of the gaps between two uses. vLLM evicts the blocks that were freed longest ago.
So where requests take turns and the working set of a round is a little larger than the pool, every
block is evicted just before a request asks for it: the hit rate does not decline, it collapses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from analysis.pool.usage import Usage, blocks_by_engine
from analysis.prefix.prompts import ENGINES, Prompts
from analysis.prefix.reuse import reuse_gaps, spans
from analysis.stats.spread import Spread, spread
from analysis.tables.session import Session

SHOWN = 10
"""How many stretches are named."""

POINTS = 40
"""Windows of a curve."""

_SHORTEST_SEC = 0.01

WINDOWS_SEC = (1, 10, 60, 600, 3600)
"""Windows of the working set, as far as they are shorter than the session."""


@dataclass(frozen=True)
class Stretch:
    """``blocks`` that ``requests`` share: the tokens from ``begin_token`` to ``end_token`` of their
    prompts.

    ``content_id``: of the last block; it stands for the prompt up to there. ``found``: the
    requests that found at least its first block in the cache. ``saved_tokens``: tokens that these
    did not have to compute.
    """

    content_id: int
    engine: int
    begin_token: int
    end_token: int
    blocks: int
    requests: int
    found: int
    saved_tokens: int


@dataclass(frozen=True)
class WorkingSet:
    """The different contents, in blocks, that an engine's requests used in the last ``window_sec``;
    in the whole session where that is None.

    ``mean_blocks``: weighted by time. ``peak_blocks``: the most, first at ``peak_sec``.
    ``pool_blocks``: usable blocks of the engine's pool, None where that is not known.
    """

    engine: int
    window_sec: float | None
    mean_blocks: float | None
    peak_blocks: int
    peak_sec: float | None
    pool_blocks: int | None


@dataclass(frozen=True)
class Level:
    """Of an engine, the mean blocks of the working set of ``window_sec``."""

    engine: int
    window_sec: float
    mean_blocks: float


@dataclass(frozen=True)
class Sharing:
    """``requests``: admitted requests whose contents are known. ``sharing``: those that have a full
    block in common with another request. ``contents``: different full blocks of all requests;
    ``shared_contents``: those that several requests have.

    ``gap``: for every block that a request asked for and an earlier one had used, the seconds from
    the admission of that one to the admission of this one. ``found_gap`` and ``missed_gap``: the
    same for blocks that the cache had and had not. ``pieces``: the stretches that saved most.
    ``working_sets``: by engine and window. ``curve``: the mean of the
    working set by engine, for windows from the shortest in which it grows to the session's length;
    empty where no time passed. ``found_rounds`` and ``missed_rounds``: by engine, the
    working set of a window as long as the median of these gaps; empty where there is no gap.
    """

    requests: int
    sharing: int
    contents: int
    shared_contents: int
    gap: Spread
    found_gap: Spread
    missed_gap: Spread
    pieces: tuple[Stretch, ...]
    working_sets: tuple[WorkingSet, ...]
    curve: tuple[Level, ...]
    found_rounds: tuple[WorkingSet, ...]
    missed_rounds: tuple[WorkingSet, ...]


def measure(session: Session, prompts: Prompts, uses: pl.DataFrame, usage: Usage) -> Sharing:
    """How requests shared contents.

    Args:
        session: the session.
        prompts: of the session.
        uses: what ``analysis.prefix.reuse.uses`` returns.
        usage: of the session's pools.

    """
    asked = prompts.asked.filter("in_window").drop_nulls("request")
    gaps = reuse_gaps(uses)
    found, missed = (
        spread(part["gap"]) for part in (gaps.filter("found"), gaps.filter(~pl.col("found")))
    )
    windows = [float(sec) for sec in WINDOWS_SEC if sec < session.end_sec - session.begin_sec]
    used = _Used(session, prompts, uses, usage)
    shared_contents = int(uses.unique("key")["blocks"].sum())
    return Sharing(
        requests=asked.height,
        sharing=uses.join(asked, on="request", how="semi")["request"].n_unique(),
        contents=int(used.alone["blocks"].sum()) + shared_contents,
        shared_contents=shared_contents,
        gap=spread(gaps["gap"]),
        found_gap=found,
        missed_gap=missed,
        pieces=_stretches(uses, asked),
        working_sets=tuple(used.working_sets([*windows, None])),
        curve=tuple(used.curve()),
        found_rounds=used.round(found),
        missed_rounds=used.round(missed),
    )


def distinct(prompts: Prompts, uses: pl.DataFrame) -> dict[int, int]:
    """By engine, how many different full blocks its requests have computed or found."""
    made = prompts.made.select("engine", "blocks")
    engine = pl.col("key") % ENGINES
    repeated = uses.filter(pl.col("key") == pl.col("key").shift(1)).select(
        engine.alias("engine"), -pl.col("blocks")
    )
    return dict(
        pl.concat([made, repeated]).group_by("engine").agg(pl.col("blocks").sum()).iter_rows()
    )


def _stretches(uses: pl.DataFrame, asked: pl.DataFrame) -> tuple[Stretch, ...]:
    sizes = asked.select("request", "block_size")
    found = pl.col("found") & pl.col("block_size").is_not_null()
    size = pl.col("block_size").max()
    contents = (
        uses.lazy()
        .join(sizes.lazy(), on="request", how="left")
        .group_by("key")
        .agg(
            pl.col("last_key", "blocks").first(),
            index=pl.col("index").first().cast(pl.Int64),
            requests=pl.len(),
            first=pl.col("order").min(),
            found=found.sum(),
            size=size,
        )
        .drop_nulls("size")
    )
    # Requests that share a block share all before it. So blocks with as many requests and the same
    # first one have the same requests.
    rows = (
        contents.sort("index")
        .group_by("first", "requests", maintain_order=True)
        .agg(
            pl.col("last_key").last(),
            (pl.col("index") * pl.col("size")).first().alias("begin_token"),
            ((pl.col("index") + pl.col("blocks")) * pl.col("size")).last().alias("end_token"),
            pl.col("blocks").sum(),
            pl.col("found").max(),
            (pl.col("found") * pl.col("blocks") * pl.col("size")).sum().alias("saved_tokens"),
        )
        .with_columns(content_id=pl.col("last_key") // ENGINES, engine=pl.col("last_key") % ENGINES)
        .sort(
            "saved_tokens",
            "requests",
            "first",
            "begin_token",
            descending=[True, True, False, False],
        )
        .head(SHOWN)
        .select(
            "content_id",
            "engine",
            "begin_token",
            "end_token",
            "blocks",
            "requests",
            "found",
            "saved_tokens",
        )
        .collect()
    )
    return tuple(Stretch(**row) for row in rows.iter_rows(named=True))


class _Used:
    """Which contents were in use from when to when.

    ``alone`` has a row for each request, with the blocks that no other request used.
    """

    def __init__(
        self, session: Session, prompts: Prompts, uses: pl.DataFrame, usage: Usage
    ) -> None:
        self._begin, self._end = session.begin_sec, session.end_sec
        self._pools = blocks_by_engine(usage)
        shared = uses.group_by("request").agg(shared=pl.col("blocks").sum())
        self.alone = (
            prompts.made.join(shared, on="request", how="left")
            .with_columns(pl.col("blocks") - pl.col("shared").fill_null(0))
            .join(spans(prompts), on="request")
        )
        same = pl.col("key") == pl.col("key").shift(-1)
        self._shared = uses.lazy().select(
            "begin_sec",
            "blocks",
            engine=pl.col("key") % ENGINES,
            before="latest_sec",
            until=pl.max_horizontal("end_sec", "latest_sec"),
            next=pl.when(same).then(pl.col("begin_sec").shift(-1)),
        )

    def working_sets(self, windows: list[float | None]) -> Iterator[WorkingSet]:
        for engine in self.alone["engine"].unique().sort():
            for window in windows:
                yield self._working_set(engine, window)

    def round(self, gap: Spread) -> tuple[WorkingSet, ...]:
        return () if gap.p50_sec is None else tuple(self.working_sets([gap.p50_sec]))

    def curve(self) -> Iterator[Level]:
        """The mean of the working set, by engine and window.

        A content is in the working set from the begin of a use to ``window`` after its end, or to
        the next use. So the mean is the sum of these times, over all uses, by the time that passed
        (Denning and Schwartz, "Properties of the Working-Set Model", 1972).
        """
        observed = self._end - self._begin
        if observed <= _SHORTEST_SEC:
            return
        windows = np.geomspace(_SHORTEST_SEC, observed, POINTS)
        alone = self.alone.select(
            "engine", "blocks", "begin_sec", until="end_sec", next=pl.lit(None, pl.Float64)
        )
        every = self._shared.select("engine", "blocks", "begin_sec", "until", "next").collect()
        uses = pl.concat([alone, every.cast(alone.schema)])
        for engine in self.alone["engine"].unique().sort():
            rows = uses.filter(pl.col("engine") == engine)
            until = rows["until"].to_numpy()
            end = rows["next"].fill_null(self._end).clip(upper_bound=self._end).to_numpy()
            begin = rows["begin_sec"].clip(self._begin).to_numpy()
            blocks = rows["blocks"].to_numpy()
            for window in windows:
                inside = np.minimum(until + window, end) - begin
                total = float((blocks * np.maximum(inside, 0)).sum())
                yield Level(engine, float(window), total / observed)

    def _working_set(self, engine: int, window: float | None) -> WorkingSet:
        """A counter rises when a content comes into use, and falls ``window`` after its last use:
        its level is the size of the working set."""
        on_engine = pl.col("engine") == engine
        alone, shared = self.alone.lazy().filter(on_engine), self._shared.filter(on_engine)
        kept = float("inf") if window is None else window
        came = pl.col("before").is_null() | (pl.col("begin_sec") > pl.col("before") + kept)
        went = pl.col("next").is_null() | (pl.col("next") > pl.col("until") + kept)
        blocks, change = pl.col("blocks"), pl.col("change")
        levels = (
            pl.concat(
                [
                    alone.select(time="begin_sec", change=blocks),
                    alone.select(time=pl.col("end_sec") + kept, change=-blocks),
                    shared.filter(came).select(time="begin_sec", change=blocks),
                    shared.filter(went).select(time=pl.col("until") + kept, change=-blocks),
                ]
            )
            .group_by(time=pl.col("time").clip(self._begin))
            .agg(change.sum())
            .sort("time")
            .select("time", level=change.cum_sum())
            .filter(pl.col("time") <= self._end)
            .with_columns(until=pl.col("time").shift(-1).fill_null(self._end))
            .collect()
        )
        observed = self._end - self._begin
        total = (levels["level"] * (levels["until"] - levels["time"])).sum()
        peak = levels.sort("level", "time", descending=[True, False]).head(1).rows()
        peak_sec, peak_blocks = peak[0][:2] if peak else (None, 0)
        return WorkingSet(
            engine=engine,
            window_sec=window,
            mean_blocks=total / observed if observed > 0 else None,
            peak_blocks=peak_blocks,
            peak_sec=peak_sec,
            pool_blocks=self._pools.get(engine),
        )
