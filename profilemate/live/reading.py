# SPDX-License-Identifier: Apache-2.0
"""One look at a session: the figures of totals.json at one moment, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from analysis.errors import SessionError, unreadable
from analysis.tables.files import opened
from profilemate.format import totals
from profilemate.format.totals import MAX_BYTES, TOTALS_FILE, checked


@dataclass(frozen=True)
class Histogram:
    """``counts[n]`` values lie below ``bounds[n]`` and not below the bound before; in ns."""

    bounds: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Pool:
    """The blocks of one pool, without its null block."""

    pool: int
    total: int
    held: int
    cached: int
    free: int
    peak_held: int


@dataclass(frozen=True)
class Counters:
    """What only ever grows in an engine. Tokens are those of the lookups that count for admitted
    requests: the true hit rate. ``unknown_evictions``: of blocks from before a pause, of which
    nobody knows whether they were reused."""

    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    regretted: int = 0
    never_reused: int = 0
    preemptions: int = 0
    arrived: int = 0
    ended: int = 0
    steps: int = 0
    idle_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    unknown_evictions: int = 0


@dataclass(frozen=True)
class Engine:
    """One data-parallel engine. ``lost``: parts of its recording that ended early."""

    engine: int
    lost: tuple[str, ...]
    pools: tuple[Pool, ...]
    running: int
    waiting: int
    counters: Counters
    lifetime: Histogram
    idle: Histogram


@dataclass(frozen=True)
class Worker:
    """Executions of a worker that served requests. Tokens: of those that replayed a graph.
    ``experts``: by MoE layer, tokens of each expert."""

    worker: int
    executions: int
    in_graph: int
    padded_tokens: int
    unpadded_tokens: int
    experts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Gpu:
    """The last sample of a GPU."""

    gpu: int
    used_bytes: int
    free_bytes: int
    utilization_pct: int | None


@dataclass(frozen=True)
class Process:
    """What recording cost a process of vLLM's so far. ``recording``: one of
    ``profilemate.format.totals.RECORDING``; None where an older collector does not say.
    ``paused_since_ns``: since when it is paused."""

    role: str
    rank: int
    dropped_events: int
    mismatches: int
    hook_ns: int
    writing_ns: int
    recording: str | None = None
    paused_since_ns: int | None = None


@dataclass(frozen=True)
class Look:
    """totals.json at one moment.

    ``written_ns``: when it was written, by the file's own time. ``until_ns``: time of the last
    event that is counted, since the session began.
    """

    session_id: str
    written_ns: int
    until_ns: int
    ended: bool
    versions: Mapping[str, str]
    engines: tuple[Engine, ...]
    workers: tuple[Worker, ...]
    gpus: tuple[Gpu, ...]
    processes: tuple[Process, ...]
    lag_ns: int | None
    longest_lag_ns: int | None


class NoTotalsError(SessionError):
    """There is no totals.json (yet)."""


def look(session: Path) -> Look:
    """What totals.json says now.

    Raises:
        NoTotalsError: there is none.
        SessionError: it cannot be read, is damaged, or is of another version.

    """
    path = session / TOTALS_FILE
    try:
        with opened(path) as file:
            written_ns = os.fstat(file.fileno()).st_mtime_ns
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise NoTotalsError(f"{path} is not there") from None
    except OSError as error:
        raise unreadable(path, error) from None
    return _look(checked(content, path), written_ns)


def _look(found: totals.RunTotals, written_ns: int) -> Look:
    collector = found["collector"]
    return Look(
        session_id=found["session_id"],
        written_ns=written_ns,
        until_ns=found["until_ns"],
        ended=found["ended"],
        versions=found["versions"],
        engines=tuple(map(_engine, found["engines"])),
        workers=tuple(map(_worker, found["workers"])),
        gpus=tuple(map(_gpu, found["gpus"])),
        processes=tuple(map(_process, found["processes"])),
        lag_ns=collector["lag_ns"],
        longest_lag_ns=collector["longest_lag_ns"],
    )


def _engine(found: totals.Engine) -> Engine:
    prefix, requests, steps = found["prefix_cache"], found["requests"], found["steps"]
    evictions = [sums for pool in found["pools"] for sums in pool["evictions"]]
    evicted = sum(sums["blocks"] for sums in evictions)
    return Engine(
        engine=found["engine"],
        lost=tuple(found["lost"]),
        pools=tuple(map(_pool, found["pools"])),
        running=requests["running"],
        waiting=requests["waiting"],
        counters=Counters(
            query_tokens=prefix["query_tokens"],
            hit_tokens=prefix["hit_tokens"],
            evictions=evicted,
            regretted=sum(pool["regretted_blocks"] for pool in found["pools"]),
            never_reused=sum(sums["never_reused"] for sums in evictions),
            preemptions=requests["preemptions"],
            arrived=requests["arrived"],
            ended=sum(requests["finished"].values()),
            steps=steps["prefill"] + steps["mixed"] + steps["decode"],
            idle_steps=steps["idle"],
            prefill_tokens=steps["prefill_tokens"],
            decode_tokens=steps["decode_tokens"],
            unknown_evictions=max(0, evicted - found["blocks"]["reuses"]["count"]),
        ),
        lifetime=_histogram(found["blocks"]["lifetime"]),
        idle=_histogram(found["blocks"]["idle"]),
    )


def _pool(found: totals.Pool) -> Pool:
    return Pool(
        pool=found["pool"],
        total=found["total_blocks"],
        held=found["held_blocks"],
        cached=found["cached_blocks"],
        free=found["free_blocks"],
        peak_held=found["peak_held_blocks"],
    )


def _worker(found: totals.Worker) -> Worker:
    served = [part for part in found["executions"] if not part["dummy"]]
    replayed = [part for part in served if part["in_graph"]]
    return Worker(
        worker=found["worker"],
        executions=sum(part["executions"] for part in served),
        in_graph=sum(part["executions"] for part in replayed),
        padded_tokens=sum(part["padded_tokens"] for part in replayed),
        unpadded_tokens=sum(part["unpadded_tokens"] for part in replayed),
        experts={layer["layer"]: tuple(layer["by_expert"]) for layer in found.get("experts", ())},
    )


def _gpu(found: totals.Gpu) -> Gpu:
    return Gpu(
        gpu=found["gpu"],
        used_bytes=found["used_bytes"],
        free_bytes=found["free_bytes"],
        utilization_pct=found["utilization_pct"],
    )


def _process(found: totals.Process) -> Process:
    return Process(
        role=found["role"],
        rank=found["rank"],
        dropped_events=found["dropped_events"],
        mismatches=found["mismatches"],
        hook_ns=found["hook_ns"],
        writing_ns=found["writing_ns"],
        recording=found.get("recording"),
        paused_since_ns=found.get("paused_since_ns"),
    )


def _histogram(found: totals.Histogram) -> Histogram:
    return Histogram(tuple(found["bounds"]), tuple(found["counts"]))
