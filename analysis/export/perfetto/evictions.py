# SPDX-License-Identifier: Apache-2.0
"""Evictions as instants: which request's contents were lost, and which request needed the room."""

from __future__ import annotations

import polars as pl

from analysis.export.clock import Clock
from analysis.export.part import Part
from analysis.export.perfetto.packets import Packets
from analysis.export.perfetto.tracks import OTHERS, Tracks
from analysis.tables.session import Session

TABLE = "kv_cache_evictions"

_COLUMNS = (
    "timestamp_sec",
    "lifetime_sec",
    "idle_sec",
    "reuse_count",
    "reason",
    "copies_left",
    "owner_request",
    "evicting_request",
    "engine",
    "pool",
)
_CALL = ("timestamp_sec", "engine", "pool", "reason", "owner_request", "evicting_request")


def write(session: Session, part: Part, packets: Packets, tracks: Tracks, clock: Clock) -> int:
    """Write the evictions of this part; returns how many blocks they are of.

    The blocks of one owner that were evicted for one request in the same moment are one instant
    ``evicted`` of the owner, with an arrow to an instant ``evicts`` of the request that needed
    them. What belonged to no request that is known is on a track of its own.

    Raises:
        SessionError: the table cannot be read.

    """
    blocks = 0
    for batch in session.batches(TABLE, _COLUMNS):
        rows = _together(
            batch.filter(part.is_in(TABLE), part.names("owner_request", "evicting_request"))
        )
        blocks += int(rows["blocks"].sum())
        for at_sec, engine, pool, reason, owner, evictor, *args in rows.iter_rows():
            at = clock.ns(at_sec)
            flows = () if evictor is None else (packets.flow(),)
            packets.instant(
                tracks.of_engine(engine, "Evictions", OTHERS)
                if owner is None
                else tracks.request(engine, owner),
                at,
                "evicted",
                (
                    ("by", evictor),
                    ("reason", reason),
                    ("pool", pool),
                    *zip(_ARGS, args, strict=True),
                ),
                flows,
            )
            if evictor is not None:
                packets.instant(
                    tracks.request(engine, evictor),
                    at,
                    "evicts",
                    (("owner", owner), ("blocks", args[0])),
                    flows,
                )
    return blocks


_ARGS = ("blocks", "never_reused", "with_copies", "mean_lifetime_sec", "mean_idle_sec")


def _together(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.group_by(_CALL, maintain_order=True).agg(
        blocks=pl.len().cast(pl.Int64),
        never_reused=(pl.col("reuse_count") == 0).sum().cast(pl.Int64),
        with_copies=(pl.col("copies_left") > 0).sum().cast(pl.Int64),
        mean_lifetime_sec=pl.col("lifetime_sec").mean(),
        mean_idle_sec=pl.col("idle_sec").mean(),
    )
