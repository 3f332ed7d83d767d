# SPDX-License-Identifier: Apache-2.0
"""One look at a session: the figures of totals.json at one moment, checked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.errors import SessionError, unreadable
from analysis.tables.files import opened
from profilemate.format.totals import FORMAT_VERSION, MAX_BYTES, TOTALS_FILE

_MOST = 10**30
"""Larger numbers are damage: nanoseconds, added up over a million years."""


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
    """Executions of a worker that served requests. Tokens: of those that replayed a graph."""

    worker: int
    executions: int
    in_graph: int
    padded_tokens: int
    unpadded_tokens: int


@dataclass(frozen=True)
class Gpu:
    """The last sample of a GPU."""

    gpu: int
    used_bytes: int
    free_bytes: int
    utilization_pct: int | None


@dataclass(frozen=True)
class Process:
    """What recording cost a process of vLLM's so far."""

    role: str
    rank: int
    dropped_events: int
    mismatches: int
    hook_ns: int
    writing_ns: int


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
    if len(content) > MAX_BYTES:
        raise SessionError(f"{path} is damaged: it is larger than {MAX_BYTES >> 20} MiB")
    try:
        found = json.loads(content)
        version = found["format_version"]
        if version == FORMAT_VERSION:
            return _look(found, written_ns)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise SessionError(f"{path} is damaged") from None
    raise SessionError(
        f"{path} has format version {str(version)[:20]}; this profilemate reads {FORMAT_VERSION}"
    )


def _look(found: Any, written_ns: int) -> Look:
    collector = found["collector"]
    return Look(
        session_id=_text(found["session_id"]),
        written_ns=written_ns,
        until_ns=_whole(found["until_ns"]),
        ended=found["ended"] is True,
        versions={_text(name): _text(version) for name, version in found["versions"].items()},
        engines=tuple(map(_engine, found["engines"])),
        workers=tuple(map(_worker, found["workers"])),
        gpus=tuple(map(_gpu, found["gpus"])),
        processes=tuple(map(_process, found["processes"])),
        lag_ns=_whole_or_none(collector["lag_ns"]),
        longest_lag_ns=_whole_or_none(collector["longest_lag_ns"]),
    )


def _engine(found: Any) -> Engine:
    prefix, requests, steps = found["prefix_cache"], found["requests"], found["steps"]
    evictions = [sums for pool in found["pools"] for sums in pool["evictions"]]
    evicted = sum(_whole(sums["blocks"]) for sums in evictions)
    busy = [_whole(steps[kind]) for kind in ("prefill", "mixed", "decode")]
    return Engine(
        engine=_whole(found["engine"]),
        lost=tuple(map(_text, found["lost"])),
        pools=tuple(map(_pool, found["pools"])),
        running=_whole(requests["running"]),
        waiting=_whole(requests["waiting"]),
        counters=Counters(
            query_tokens=_whole(prefix["query_tokens"]),
            hit_tokens=_whole(prefix["hit_tokens"]),
            evictions=evicted,
            regretted=sum(_whole(pool["regretted_blocks"]) for pool in found["pools"]),
            never_reused=sum(_whole(sums["never_reused"]) for sums in evictions),
            preemptions=_whole(requests["preemptions"]),
            arrived=_whole(requests["arrived"]),
            ended=sum(map(_whole, requests["finished"].values())),
            steps=sum(busy),
            idle_steps=_whole(steps["idle"]),
            prefill_tokens=_whole(steps["prefill_tokens"]),
            decode_tokens=_whole(steps["decode_tokens"]),
            unknown_evictions=max(0, evicted - _whole(found["blocks"]["reuses"]["count"])),
        ),
        lifetime=_histogram(found["blocks"]["lifetime"]),
        idle=_histogram(found["blocks"]["idle"]),
    )


def _pool(found: Any) -> Pool:
    return Pool(
        pool=_whole(found["pool"]),
        total=_whole(found["total_blocks"]),
        held=_whole(found["held_blocks"]),
        cached=_whole(found["cached_blocks"]),
        free=_whole(found["free_blocks"]),
        peak_held=_whole(found["peak_held_blocks"]),
    )


def _worker(found: Any) -> Worker:
    served = [part for part in found["executions"] if part["dummy"] is False]
    replayed = [part for part in served if part["in_graph"] is True]
    return Worker(
        worker=_whole(found["worker"]),
        executions=sum(_whole(part["executions"]) for part in served),
        in_graph=sum(_whole(part["executions"]) for part in replayed),
        padded_tokens=sum(_whole(part["padded_tokens"]) for part in replayed),
        unpadded_tokens=sum(_whole(part["unpadded_tokens"]) for part in replayed),
    )


def _gpu(found: Any) -> Gpu:
    return Gpu(
        gpu=_whole(found["gpu"]),
        used_bytes=_whole(found["used_bytes"]),
        free_bytes=_whole(found["free_bytes"]),
        utilization_pct=_whole_or_none(found["utilization_pct"]),
    )


def _process(found: Any) -> Process:
    return Process(
        role=_text(found["role"]),
        rank=_whole(found["rank"]),
        dropped_events=_whole(found["dropped_events"]),
        mismatches=_whole(found["mismatches"]),
        hook_ns=_whole(found["hook_ns"]),
        writing_ns=_whole(found["writing_ns"]),
    )


def _histogram(found: Any) -> Histogram:
    bounds = tuple(map(_whole, found["bounds"]))
    counts = tuple(map(_whole, found["counts"]))
    if len(counts) != len(bounds) + 1 or list(bounds) != sorted(bounds):
        raise ValueError
    return Histogram(bounds, counts)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError
    return value


def _whole_or_none(value: Any) -> int | None:
    return None if value is None else _whole(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value
