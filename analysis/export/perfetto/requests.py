# SPDX-License-Identifier: Apache-2.0
"""Requests as tracks: from arrival to end, with the phases between, and who preempted whom."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.export.clock import Clock
from analysis.export.part import Part
from analysis.export.perfetto.packets import Packets
from analysis.export.perfetto.tracks import Tracks
from analysis.export.phases import PREEMPTED, SHOWN, Phases

_CHUNK = 10_000


@dataclass(frozen=True)
class _Preemption:
    """``flow``: the number of its arrow; None where it has none."""

    engine: int
    victim: str
    recomputed_tokens: int
    made_room_for: str | None
    flow: int | None


def write(phases: Phases, part: Part, packets: Packets, tracks: Tracks, clock: Clock) -> int:
    """Write the requests of this part, each from its arrival to its end; returns how many.

    A preemption is an arrow from the victim's phase ``preempted`` to an instant ``preempts`` of the
    request that room was made for. Where that was the victim itself, there is no arrow.
    """
    chosen = phases.requests.filter(
        part.covers(pl.col("arrived_sec"), pl.col("finish_sec")), part.names("request_id")
    ).sort("arrived_sec", "request")
    preemptions = {
        stint: _Preemption(
            engine, victim, recomputed, culprit, packets.flow() if culprit and not own else None
        )
        for stint, engine, victim, recomputed, culprit, own in phases.preemptions.select(
            "stint", "engine", "request_id", "recomputed", "made_room_for", "by_itself"
        ).iter_rows()
    }
    arrows: list[tuple[int, _Preemption]] = []
    for rows in chosen.iter_slices(_CHUNK):
        spans = phases.spans.join(rows.select("request"), on="request", how="semi")
        of_request = spans.partition_by("request", as_dict=True, include_key=False)
        for number, engine, name, arrived, finished, *args in rows.select(
            "request", "engine", "request_id", "arrived_sec", "finish_sec", *SHOWN
        ).iter_rows():
            track, last = tracks.request(engine, name), clock.ns(max(arrived, finished))
            packets.begin(track, clock.ns(arrived), "request", zip(SHOWN, args, strict=True))
            for phase, begin, end, stint in of_request[number,].iter_rows():
                at = min(clock.ns(begin), last)
                known = preemptions.get(stint) if phase == PREEMPTED else None
                _begin(packets, track, at, phase, known)
                packets.end(track, min(clock.ns(end), last))
                if known is not None and known.flow is not None:
                    arrows.append((at, known))
            packets.end(track, last)
    # An arrow leads to the later one of two events, or of those of one moment to the one behind.
    for at, known in arrows:
        packets.instant(
            tracks.request(known.engine, known.made_room_for or ""),
            at,
            "preempts",
            (("victim", known.victim), ("recomputed_tokens", known.recomputed_tokens)),
            (known.flow or 0,),
        )
    return chosen.height


def _begin(
    packets: Packets, track: int, at_ns: int, phase: str, preemption: _Preemption | None
) -> None:
    if preemption is None:
        packets.begin(track, at_ns, phase)
        return
    args = (
        ("made_room_for", preemption.made_room_for),
        ("recomputed_tokens", preemption.recomputed_tokens),
    )
    flows = () if preemption.flow is None else (preemption.flow,)
    packets.begin(track, at_ns, phase, args, flows)
