# SPDX-License-Identifier: Apache-2.0
"""An engine's steps as slices, and its pools, running and waiting requests and tokens as values
over time."""

from __future__ import annotations

from analysis.export.clock import Clock
from analysis.export.part import Part
from analysis.export.perfetto.packets import Packets
from analysis.export.perfetto.tracks import POOLS, STEPS, TOKENS, Tracks
from analysis.tables.session import Session

_STEPS = "scheduler_steps"
_USAGE = "kv_cache_usage"

_ARGS = (
    "step",
    "prefill_tokens",
    "decode_tokens",
    "scheduled_reqs",
    "preempted_reqs",
    "finished_reqs",
    "repeats",
)
_BLOCKS = ("held", "cached", "free")
_REQUESTS = ("running", "waiting")


def write_steps(
    session: Session, part: Part, packets: Packets, tracks: Tracks, clock: Clock
) -> int:
    """Write a slice for each row of scheduler_steps.csv: the call of ``schedule()``. Its name says
    whether the step had tokens of prompts, of answers, or both. Returns how many steps they are.

    Raises:
        SessionError: the table cannot be read.

    """
    steps = 0
    ended: dict[int, int] = {}
    columns = ("timestamp_sec", "engine", "schedule_us", *_ARGS)
    for batch in session.batches(_STEPS, columns):
        for at_sec, engine, took_us, *args in batch.filter(part.is_in(_STEPS)).iter_rows():
            prefill, decode, repeats = args[1] or 0, args[2] or 0, args[-1] or 1
            steps += repeats
            track = tracks.of_engine(engine, "Steps", STEPS)
            end = clock.ns(at_sec)
            begin = max(end - round((took_us or 0) * 1e3), ended.get(engine, clock.begin_ns))
            ended[engine] = max(begin, end)
            packets.begin(track, begin, _kind(prefill, decode), zip(_ARGS, args, strict=True))
            packets.end(track, ended[engine])
            tokens = tracks.of_engine(engine, "Tokens of a step", TOKENS)
            for name, value in (("prefill", prefill), ("decode", decode)):
                packets.count(tracks.counter(tokens, name, "tokens", 0), end, value)
    return steps


def _kind(prefill: int, decode: int) -> str:
    if not prefill:
        return "decode" if decode else "idle"
    return "mixed" if decode else "prefill"


def write_pools(
    session: Session, part: Part, packets: Packets, tracks: Tracks, clock: Clock
) -> None:
    """Write the blocks that are held, cached and free, and the requests that run and wait, each
    where it changed.

    Raises:
        SessionError: the table cannot be read.

    """
    last: dict[int, int] = {}
    columns = (
        *("timestamp_sec", "engine", "pool", "num_blocks", "cached_blocks", "free_blocks"),
        *("running_reqs", "waiting_reqs"),
    )
    for batch in session.batches(_USAGE, columns):
        for at_sec, engine, pool, *values in batch.filter(part.is_in(_USAGE)).iter_rows():
            at = clock.ns(at_sec)
            blocks = tracks.of_engine(engine, f"Pool {pool}", POOLS)
            requests = tracks.of_engine(engine, "Running and waiting", POOLS)
            counters = (
                *(tracks.counter(blocks, name, "blocks", rank) for rank, name in _NAMED[:3]),
                *(tracks.counter(requests, name, "requests", rank) for rank, name in _NAMED[3:]),
            )
            for counter, value in zip(counters, values, strict=True):
                if value is not None and last.get(counter) != value:
                    last[counter] = value
                    packets.count(counter, at, value)


_NAMED = tuple(enumerate((*_BLOCKS, *_REQUESTS)))
