# SPDX-License-Identifier: Apache-2.0
"""A session as a trace for Perfetto: what ran, on tracks over time.

Times are nanoseconds since 1970, by the wall clock of the session's beginning. Table by table, the
trace is written as the tables are read; only the requests that ended are in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from analysis.export import part as parts
from analysis.export import phases
from analysis.export.clock import Clock
from analysis.export.part import WHOLE, Part
from analysis.export.perfetto import engine, evictions, gpu, requests, torch_profiler
from analysis.export.perfetto.packets import Packets
from analysis.export.perfetto.tracks import Tracks
from analysis.tables import marks
from analysis.tables.session import Session


@dataclass(frozen=True)
class Written:
    """How much is in the trace: ``requests`` that ended, ``steps`` of the scheduler,
    ``evicted_blocks``, ``captures`` and ``executions`` of batches, ``torch_events`` of a profile.
    """

    requests: int
    steps: int
    evicted_blocks: int
    captures: int
    executions: int
    torch_events: int


def write(
    session: Session, file: BinaryIO, part: Part = WHOLE, profile: Path | None = None
) -> Written:
    """Write this part of the session as a trace.

    Args:
        session: the session.
        file: where it goes.
        part: which part of it.
        profile: a trace of torch's profiler that is put beside it.

    Raises:
        SessionError: a table or the profile cannot be read, or nothing is in this part.

    """
    part = parts.resolved(session, part)
    clock = Clock.of(session)
    packets = Packets(file)
    tracks = Tracks(packets)
    packets.clock(clock.ns(part.begin_sec or session.begin_sec))
    to = (packets, tracks, clock)
    for mark in marks.read(session.directory):
        if (part.begin_sec or 0) <= mark.at_sec < (part.end_sec or float("inf")):
            packets.instant(tracks.top("Marks", 3000), clock.ns(mark.at_sec), mark.text)
    steps = engine.write_steps(session, part, *to)
    engine.write_pools(session, part, *to)
    captured, executed = gpu.write(session, part, *to)
    ended = requests.write(phases.read(session), part, *to)
    blocks = evictions.write(session, part, *to)
    events = 0 if profile is None else torch_profiler.write(profile, part, *to)
    packets.finish()
    return Written(ended, steps, blocks, captured, executed, events)
