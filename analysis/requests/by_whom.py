# SPDX-License-Identifier: Apache-2.0
"""Who asked for what, who got it, and who took it from whom?

The figures of a session, split by cache salt, adapter, priority, API server, engine, or a label of
the user's. The sums over all keys are the session's own figures. What no request that has ended
accounts for is a part of its own, not known.

A request that has ended is known by its row. Evictions, rent and preemptions name a request by
its id; where a client used an id again, the last one of these requests counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from analysis.prefix import miss_summary
from analysis.prefix.prompts import ENGINES
from analysis.requests import fan_out
from analysis.requests.askers import EVERY, NONE, NOT_KNOWN, VALUE, Askers, By
from analysis.requests.fan_out import FanOut
from analysis.stats.quantiles import of_sample

MOST = 10_000
"""So many keys are kept apart, those with the most prompt tokens; all others are the rest."""

_REST = 3
"""The kind of the keys that are beyond ``MOST``."""


@dataclass(frozen=True)
class Share:
    """What belongs to one key. ``key``: None for requests that have none: no salt, no adapter, no
    label.

    Of the admitted requests, each counted once: ``requests``, ``query_tokens`` and ``hit_tokens``
    (a KV connector's included) of their prompts, ``hit_rate`` (of these, from 0 to 1), and
    ``missed_by_reason`` in full blocks, by the reasons of ``analysis.prefix.misses``.
    ``known_elsewhere_tokens``: the compulsory ones of them that had come before under another salt
    or adapter; None where that is not known.

    ``recomputed_for_it_tokens``: tokens that any request computed again because this key's requests
    had evicted them for room; ``of_others_tokens``: those of them that requests of other keys did.
    ``evicted_blocks``: that its requests evicted. ``lost_blocks``: evicted ones that its requests
    were the last to hold. ``held`` and ``kept``: its rent, in block-seconds, as in
    ``analysis.prefix.rent``.

    ``preempted``: preemptions of its requests. ``preempted_others``: resumed preemptions of other
    requests that made room for its.

    Of the requests that ended: ``ended``, ``output_tokens``, ``draft_tokens`` that speculation
    proposed and those of them that were accepted (``accepted_tokens``), and the seconds from
    arrival to admission and to the first token, None where there is none.
    """

    key: str | None
    requests: int
    query_tokens: int
    hit_tokens: int
    hit_rate: float | None
    missed_by_reason: Mapping[str, int]
    known_elsewhere_tokens: int | None
    recomputed_for_it_tokens: int
    of_others_tokens: int
    evicted_blocks: int
    lost_blocks: int
    held: float
    kept: float
    preempted: int
    preempted_others: int
    ended: int
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int
    queued_p50_sec: float | None
    queued_p95_sec: float | None
    first_token_p50_sec: float | None
    first_token_p95_sec: float | None


@dataclass(frozen=True)
class Split:
    """The session's figures by one kind of key: ``by``.

    ``keys``: how many there are, that of requests without one included. ``shares``: those with the
    most prompt tokens, the most first. ``rest``: all other keys together. ``not_known``: what no
    request that has ended accounts for. The last two are None where there is nothing of it.
    """

    by: By
    keys: int
    shares: tuple[Share, ...]
    rest: Share | None
    not_known: Share | None


@dataclass(frozen=True)
class ByWhom:
    """``splits``: by each kind of key that the session's requests have. ``known_elsewhere_tokens``:
    prompt tokens that were new to their salt or adapter alone; None where that is not known.
    ``fan_out``: requests that are parts of one call."""

    splits: tuple[Split, ...]
    known_elsewhere_tokens: int | None
    fan_out: FanOut

    def split(self, by: str) -> Split | None:
        """The split by this kind of key, if there is one."""
        return next((split for split in self.splits if split.by == by), None)


def measure(
    askers: Askers,
    asked: pl.DataFrame,
    missed: pl.DataFrame,
    apart: pl.DataFrame | None,
    paid: pl.DataFrame,
    owned: pl.DataFrame,
    evicted: pl.DataFrame,
    priced: pl.DataFrame,
    preemptions: int,
) -> ByWhom:
    """The splits of a session.

    Args:
        askers: who its requests are.
        asked: ``Prompts.asked`` of the session.
        missed: what ``analysis.prefix.misses.classify`` returns.
        apart: what ``analysis.prefix.apart.new_to_their_own`` returns; None where it is not known.
        paid: what ``analysis.prefix.rent.RentTally.result`` returns.
        owned: what ``analysis.pool.evictions.EvictionTally.kept_by_owner`` returns.
        evicted: what its ``by_evictor`` returns.
        priced: what ``analysis.requests.preemption_bill.measure`` returns.
        preemptions: all of the session, those included that no request's row has.

    """
    counted = asked.filter("in_window").with_columns(
        found=pl.col("hit_tokens") + pl.col("external_hit_tokens").fill_null(0)
    )
    reasons = _reasons(counted, missed)
    costs = _costs(askers, counted, missed)
    room = _room(askers, priced)
    ended = askers.requests.filter("counts")
    sums = [
        counted.select(*_WHO, requests=pl.lit(1), query_tokens="query_tokens", hit_tokens="found"),
        _elsewhere(counted, apart),
        askers.by_name(paid).select(
            *_WHO, held=pl.sum_horizontal("waiting", "decoding", "running")
        ),
        askers.by_name(owned).select(*_WHO, kept="kept", lost_blocks="blocks"),
        askers.by_name(evicted.rename({"evicting_request": "request_id"})).select(
            *_WHO, evicted_blocks="blocks"
        ),
        ended.select(
            *_WHO,
            "draft_tokens",
            "accepted_tokens",
            ended=pl.lit(1),
            output_tokens="output_length",
            preempted="preemptions",
        ),
        _without_row(preemptions - int(ended["preemptions"].sum())),
    ]
    splits = [
        _split(by, askers, sums, reasons, costs, room, ended, is_known=apart is not None)
        for by in EVERY
        if by != "label" or askers.rules
    ]
    elsewhere = None if apart is None else int(sums[1]["known_elsewhere_tokens"].sum())
    return ByWhom(tuple(splits), elsewhere, fan_out.measure(ended))


_WHO = ("request", "engine", "request_id")
_KEY = ("kind", "key")
_COUNTS = (
    "requests",
    "query_tokens",
    "hit_tokens",
    "known_elsewhere_tokens",
    "evicted_blocks",
    "lost_blocks",
    "preempted",
    "ended",
    "output_tokens",
    "draft_tokens",
    "accepted_tokens",
    "recomputed_for_it_tokens",
    "of_others_tokens",
    "preempted_others",
)
_SECONDS = ("held", "kept")


def _reasons(counted: pl.DataFrame, missed: pl.DataFrame) -> pl.DataFrame:
    """Tokens that each lookup missed for each reason."""
    known = counted.drop_nulls("request")
    tokens = miss_summary.by_lookup(known, missed).select(
        "lookup", "reason", tokens=pl.col("blocks").cast(pl.Int64) * pl.col("block_size")
    )
    not_ended = counted.filter(pl.col("request").is_null()).select(
        "lookup", reason=pl.lit("unknown"), tokens=pl.col("query_tokens") - pl.col("found")
    )
    who = counted.select("lookup", *_WHO)
    return pl.concat([tokens, not_ended.filter(pl.col("tokens") > 0)]).join(who, on="lookup")


def _elsewhere(counted: pl.DataFrame, apart: pl.DataFrame | None) -> pl.DataFrame:
    if apart is None:
        schema = {name: counted.schema[name] for name in _WHO}
        return pl.DataFrame(schema={**schema, "known_elsewhere_tokens": pl.Int64})
    return apart.join(counted.select("lookup", *_WHO, "block_size"), on="lookup").select(
        *_WHO, known_elsewhere_tokens="block_size"
    )


def _costs(askers: Askers, counted: pl.DataFrame, missed: pl.DataFrame) -> pl.DataFrame:
    """A row for each evictor and each lookup that had to compute its evictions again.

    Columns: those of ``_WHO`` of the evictor; the same of the lookup, with ``_by`` behind their
    names; ``tokens``.
    """
    lost = (
        missed.filter(pl.col("reason") == "capacity")
        .group_by(
            "lookup",
            engine=pl.col("key") % ENGINES,
            request_id=pl.col("evicting_request").cast(pl.String),
        )
        .agg(blocks=pl.len().cast(pl.Int64))
    )
    victims = counted.select("lookup", "block_size", **{f"{name}_by": name for name in _WHO})
    return (
        askers.by_name(lost)
        .join(victims, on="lookup")
        .select(
            *_WHO,
            *(f"{name}_by" for name in _WHO),
            tokens=pl.col("blocks") * pl.col("block_size"),
        )
    )


def _room(askers: Askers, priced: pl.DataFrame) -> pl.DataFrame:
    """Whom room was made for, by preempting another request."""
    made = priced.filter(~pl.col("by_itself") & pl.col("made_room_for").is_not_null())
    return askers.by_name(made.select("engine", request_id="made_room_for")).select(
        *_WHO, preempted_others=pl.lit(1)
    )


def _without_row(preemptions: int) -> pl.DataFrame:
    """Preemptions of requests that have no row: they had not ended."""
    schema = {"request": pl.UInt32, "engine": pl.Int64, "request_id": pl.String}
    return pl.DataFrame(
        [(None, None, None, preemptions)] if preemptions > 0 else [],
        schema={**schema, "preempted": pl.Int64},
        orient="row",
    )


def _split(
    by: By,
    askers: Askers,
    sums: Sequence[pl.DataFrame],
    reasons: pl.DataFrame,
    costs: pl.DataFrame,
    room: pl.DataFrame,
    ended: pl.DataFrame,
    *,
    is_known: bool,
) -> Split:
    added = [
        askers.keyed(part, by).group_by(_KEY).agg(pl.exclude(*_WHO, *_KEY).sum())
        for part in (*sums, room, _caused(askers, costs, by))
    ]
    typed = [part.cast({name: _SUMS[name] for name in part.columns}) for part in added]
    rows = (
        pl.concat([pl.DataFrame(schema=_SUMS), *typed], how="diagonal")
        .group_by(_KEY)
        .agg(pl.col(*_COUNTS, *_SECONDS).sum())
        .filter(pl.any_horizontal(pl.col(*_COUNTS, *_SECONDS) != 0))
        .sort("query_tokens", "kind", "key", descending=[True, False, False])
    )
    shown = rows.filter(pl.col("kind") == VALUE).head(MOST).select(*_KEY, shown=pl.lit(value=True))

    def folded(figures: pl.DataFrame) -> pl.DataFrame:
        """The figures with all keys that are not shown as one."""
        known = figures.join(shown, on=_KEY, how="left")
        is_rest = (pl.col("kind") == VALUE) & pl.col("shown").is_null()
        return known.with_columns(
            kind=pl.when(is_rest).then(pl.lit(_REST)).otherwise("kind"),
            key=pl.when(~is_rest).then("key"),
        ).drop("shown")

    def keyed(figures: pl.DataFrame) -> pl.DataFrame:
        return folded(askers.keyed(figures, by).cast({"kind": _SUMS["kind"]}))

    keys = rows.filter(pl.col("kind").is_in([VALUE, NONE])).height
    rows = folded(rows).group_by(_KEY, maintain_order=True).agg(pl.exclude(_KEY).sum())
    by_reason: dict[tuple[int, str | None], dict[str, int]] = {}
    tokens = keyed(reasons).group_by(*_KEY, "reason").agg(pl.col("tokens").sum())
    for kind, key, reason, count in tokens.sort("tokens", "reason", descending=True).iter_rows():
        by_reason.setdefault((kind, key), {})[reason] = count
    waits = {
        (kind, key): (queued, first)
        for kind, key, queued, first in keyed(ended)
        .group_by(_KEY)
        .agg(pl.col("queued", "first_token").drop_nulls().sort())
        .select(*_KEY, "queued", "first_token")
        .iter_rows()
    }
    shares = {}
    for row in rows.sort("query_tokens", "kind", "key", descending=[True, False, False]).iter_rows(
        named=True
    ):
        name = (row["kind"], row["key"])
        reasons_of, waited = by_reason.get(name, {}), waits.get(name, ((), ()))
        shares[name] = _share(row, reasons_of, waited, is_known=is_known)
    return Split(
        by=by,
        keys=keys,
        shares=tuple(share for (kind, _), share in shares.items() if kind in (VALUE, NONE)),
        rest=shares.get((_REST, None)),
        not_known=shares.get((NOT_KNOWN, None)),
    )


_SUMS = {
    "kind": pl.Int32,
    "key": pl.String,
    **dict.fromkeys(_COUNTS, pl.Int64),
    **dict.fromkeys(_SECONDS, pl.Float64),
}


def _caused(askers: Askers, costs: pl.DataFrame, by: By) -> pl.DataFrame:
    """What each evictor cost, and how much of it requests of other keys paid."""
    numbered = costs.with_row_index("row")
    victims = numbered.select("row", **{name: f"{name}_by" for name in _WHO})
    paid_by = askers.keyed(victims, by).select("row", kind_by="kind", key_by="key")
    is_other = (pl.col("kind") != pl.col("kind_by")) | pl.col("key").ne_missing(pl.col("key_by"))
    return (
        askers.keyed(numbered, by)
        .join(paid_by, on="row")
        .select(
            *_WHO,
            recomputed_for_it_tokens="tokens",
            of_others_tokens=pl.when(is_other).then("tokens").otherwise(0),
        )
    )


def _share(
    row: Mapping[str, Any],
    missed: Mapping[str, int],
    waits: tuple[Sequence[float], Sequence[float]],
    *,
    is_known: bool,
) -> Share:
    queued, first = (pl.Series(values, dtype=pl.Float64) for values in waits)
    figures = {name: row[name] for name in (*_COUNTS, *_SECONDS)}
    if not is_known:
        figures["known_elsewhere_tokens"] = None
    asked = row["query_tokens"]
    return Share(
        key=row["key"],
        hit_rate=row["hit_tokens"] / asked if asked else None,
        missed_by_reason=missed,
        queued_p50_sec=of_sample(queued, 50),
        queued_p95_sec=of_sample(queued, 95),
        first_token_p50_sec=of_sample(first, 50),
        first_token_p95_sec=of_sample(first, 95),
        **figures,
    )


def together(shares: Sequence[Share]) -> Share:
    """Several keys as one, without a key and without its times: quantiles do not add up."""
    missed: dict[str, int] = {}
    for share in shares:
        for reason, tokens in share.missed_by_reason.items():
            missed[reason] = missed.get(reason, 0) + tokens
    known = [share.known_elsewhere_tokens for share in shares]
    elsewhere = None if None in known else sum(filter(None, known))
    sums = {
        name: sum(getattr(share, name) for share in shares)
        for name in (*_COUNTS, *_SECONDS)
        if name != "known_elsewhere_tokens"
    }
    return Share(
        key=None,
        hit_rate=sums["hit_tokens"] / sums["query_tokens"] if sums["query_tokens"] else None,
        missed_by_reason=missed,
        known_elsewhere_tokens=elsewhere,
        queued_p50_sec=None,
        queued_p95_sec=None,
        first_token_p50_sec=None,
        first_token_p95_sec=None,
        **sums,
    )
