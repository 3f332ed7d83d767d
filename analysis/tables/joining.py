# SPDX-License-Identifier: Apache-2.0
"""Make one session out of those of one deployment on several hosts.

Its tables have the rows of all, with the times of one of them. Ranks of engines and workers, and
numbers of GPUs, stay as they are where no two sessions have the same; otherwise those of the later
sessions move up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import polars as pl

from analysis.errors import SessionError
from analysis.tables import host_clocks, marks
from analysis.tables.faults import shown
from analysis.tables.metadata import flag, listed, number, part, parts, text, whole
from analysis.tables.schema import TABLES, Table
from analysis.tables.session import Session
from profilemate.format.files import opened_atomically, write_atomically
from profilemate.format.marks import MARKS_FILE, Mark, line
from profilemate.format.session import METADATA_FILE

_TIMES = ("first_token_sec", "finish_sec", "since_sec")
"""Columns that hold moments, beside each table's own. All other seconds are lengths."""


@dataclass(frozen=True)
class Part:
    """One of the sessions. ``shift_sec`` is added to its times, ``engines``, ``workers`` and
    ``gpus`` to its numbers of these."""

    session: Session
    host: str
    shift_sec: float
    engines: int = 0
    workers: int = 0
    gpus: int = 0


@dataclass(frozen=True)
class Joined:
    """``error_sec``: how far times of two hosts may be off; None where that is not known."""

    deployment: str
    parts: tuple[Part, ...]
    error_sec: float | None


def joined(sessions: Sequence[Session]) -> Joined:
    """How these sessions become one, the earliest first.

    Raises:
        SessionError: they are not of one deployment, or cannot be joined.

    """
    deployment = _deployment(sessions)
    clocks = []
    for session in sessions:
        clock = host_clocks.clock_of(session.metadata)
        if clock is None:
            raise SessionError(f"{session.directory} does not say when it began; leave it out")
        clocks.append(clock)
        _refuse_parts(session)
    found = zip(host_clocks.shifts(clocks), sessions, strict=True)
    ordered = sorted(found, key=lambda pair: pair[0])
    _refuse_apart(ordered)
    joined_parts: list[Part] = []
    for shift, session in ordered:
        earlier = [one.session for one in joined_parts]
        host = text(session.metadata.get("host")) or session.directory.name
        numbers = (
            _moved(session, joined_parts, _engines, lambda one: one.engines),
            _moved(session, joined_parts, _workers, lambda one: one.workers),
            _moved(session, joined_parts, _gpus, lambda one: one.gpus),
        )
        if any(one.directory == session.directory for one in earlier):
            raise SessionError(f"{session.directory} is named twice")
        joined_parts.append(Part(session, host, shift, *numbers))
    return Joined(deployment, tuple(joined_parts), host_clocks.error_sec(clocks))


def write(found: Joined, folder: Path) -> None:
    """Write the joined session into an empty folder, metadata.json last.

    Raises:
        SessionError: a table cannot be read, or a line of it is malformed.
        OSError: a file cannot be written.

    """
    table_bytes = sum(_write_table(found, table, folder / table.file) for table in TABLES.values())
    moments = [
        Mark(mark.at_sec + one.shift_sec, mark.text)
        for one in found.parts
        for mark in marks.read(one.session.directory)
    ]
    if moments:
        moments.sort(key=lambda mark: mark.at_sec)
        write_atomically(folder / MARKS_FILE, b"".join(map(line, moments)))
    content = json.dumps(_metadata(found, table_bytes), indent=2)
    write_atomically(folder / METADATA_FILE, content.encode() + b"\n")


def _deployment(sessions: Sequence[Session]) -> str:
    names = [text(session.metadata.get("deployment")) for session in sessions]
    for name, session in zip(names, sessions, strict=True):
        if name is None:
            raise SessionError(
                f"{session.directory} is of no named deployment, so it cannot be joined; set "
                "VLLM_PROFILING_DEPLOYMENT alike on all hosts"
            )
    for (one, first), (other, second) in combinations(zip(names, sessions, strict=True), 2):
        if one != other:
            raise SessionError(
                f"{first.directory} is of deployment {shown(str(one))}, and {second.directory} of "
                f"{shown(str(other))}; join sessions of one deployment"
            )
    return str(names[0])


def _refuse_parts(session: Session) -> None:
    """Only whole sessions are joined: a window explains its beginning by rows of its own, and after
    a pause figures are of one period."""
    if session.window is not None:
        raise SessionError(
            f"{session.directory} lacks its oldest segments, so it cannot be joined; record with a "
            "larger VLLM_PROFILING_KEEP"
        )
    if session.period is not None:
        raise SessionError(
            f"the recording of {session.directory} was paused, so it cannot be joined; look at it "
            "alone"
        )


def _refuse_apart(ordered: Sequence[tuple[float, Session]]) -> None:
    """Runs that follow each other are not one."""
    end = 0.0
    for shift, session in ordered:
        if shift > end and end:
            raise SessionError(
                f"{session.directory} began when the others had ended; join the sessions of one run"
            )
        end = max(end, shift + session.end_sec)


Numbers = Callable[[Session], set[int]]


def _moved(
    session: Session, earlier: Sequence[Part], numbers: Numbers, moved: Callable[[Part], int]
) -> int:
    """How far this session's numbers move, so that none is an earlier session's."""
    taken = {number + moved(one) for one in earlier for number in numbers(one.session)}
    return max(taken) + 1 if taken & numbers(session) else 0


def _ranks(session: Session, role: str) -> set[int]:
    processes = parts(session.metadata, "processes")
    ranks = (whole(each.get("rank")) for each in processes if each.get("role") == role)
    return {rank for rank in ranks if rank is not None}


def _engines(session: Session) -> set[int]:
    return _ranks(session, "engine")


def _workers(session: Session) -> set[int]:
    return _ranks(session, "worker")


def _gpus(session: Session) -> set[int]:
    numbers = (whole(each.get("gpu")) for each in parts(session.metadata, "gpus"))
    return {each for each in numbers if each is not None}


def _write_table(found: Joined, table: Table, path: Path) -> int:
    """Write the rows of all sessions; returns the bytes."""
    frames = [_shifted(one, table) for one in found.parts if _has_rows(one.session, table)]
    if not frames:
        return 0
    # Rows of one engine keep their order, also those of one time: the sort is stable.
    order = "finish_sec" if table.name == "requests" else table.time
    whole_table = pl.concat(frames).sort(order, maintain_order=True, nulls_last=False)
    with opened_atomically(path) as file:
        if table.is_csv:
            whole_table.write_csv(file)
        else:
            whole_table.write_ndjson(file)
    return path.stat().st_size


def _has_rows(session: Session, table: Table) -> bool:
    return bool(session.scan(table.name, history=True).limit(1).collect().height)


def _shifted(one: Part, table: Table) -> pl.DataFrame:
    """A table's rows with the times and the numbers of the joined session."""
    times = [table.time, *(name for name in _TIMES if name in table.columns)]
    moved = {"engine": one.engines, "worker": one.workers, "gpu": one.gpus}
    changes = [
        (pl.col(name) + one.shift_sec / (table.time_unit if name == table.time else 1.0)).round(6)
        for name in times
    ]
    changes += [pl.col(name) + by for name, by in moved.items() if name in table.columns]
    return one.session.collect(
        table.name, lambda rows: rows.with_columns(changes), history=True
    ).select(list(table.columns))


def _metadata(found: Joined, table_bytes: int) -> dict[str, Any]:
    """That of the first session with an engine, with what all of them say."""
    sessions = [one.session for one in found.parts]
    first = next((one for one in sessions if _engines(one)), sessions[0]).metadata
    earliest = sessions[0].metadata
    keys = {session.metadata.get("contents_key") for session in sessions if _engines(session)}
    is_one_key = len(keys) == 1 and None not in keys
    shared = all(flag(one.metadata.get("content_ids_shared")) for one in sessions if _engines(one))
    ended = [text(session.metadata.get("ended_at")) for session in sessions]
    return {
        **first,
        "session_id": "+".join(one.directory.name for one in sessions),
        "deployment": found.deployment,
        "host": ", ".join(dict.fromkeys(one.host for one in found.parts)),
        "started_at": earliest.get("started_at"),
        "ended_at": max(filter(None, ended)) if all(ended) else None,
        "duration_sec": round(max(one.shift_sec + one.session.end_sec for one in found.parts), 6),
        "complete": all(flag(one.metadata.get("complete")) for one in sessions),
        "dropped_events": _sum(one.metadata.get("dropped_events") for one in sessions),
        "segments": 0,
        "window": None,
        "snapshots": None,
        "clock": None,
        "processes": [process for one in found.parts for process in _processes(one)],
        "parallel": _parallel(found, first),
        "gpus": [gpu for one in found.parts for gpu in _gpus_of(one)],
        "content_ids_shared": shared and is_one_key,
        "contents_key": next(iter(keys)) if is_one_key else None,
        "contents_apart_because": None if is_one_key else "the sessions have no key in common",
        "cost": {**_costs(sessions), "table_bytes": table_bytes},
        "joined": {
            "error_sec": found.error_sec,
            "parts": [
                {
                    "session_id": one.session.directory.name,
                    "host": one.host,
                    "shift_sec": round(one.shift_sec, 6),
                    "engines": sorted(rank + one.engines for rank in _engines(one.session)),
                    "workers": sorted(rank + one.workers for rank in _workers(one.session)),
                }
                for one in found.parts
            ],
        },
    }


def _processes(one: Part) -> list[dict[str, Any]]:
    moved = {"engine": one.engines, "worker": one.workers}
    return [
        {
            **process,
            "host": one.host,
            "rank": (whole(process.get("rank")) or 0) + moved.get(str(process.get("role")), 0),
        }
        for process in parts(one.session.metadata, "processes")
    ]


def _parallel(found: Joined, first: Mapping[str, Any]) -> dict[str, Any]:
    """A dense model's engines each believe that they are the only one."""
    ranks = {rank + one.engines for one in found.parts for rank in _engines(one.session)}
    stated = part(first, "parallel")
    return {**stated, "data": max(whole(stated.get("data")) or 1, len(ranks))}


def _gpus_of(one: Part) -> list[dict[str, Any]]:
    return [
        {
            **gpu,
            "gpu": None if (index := whole(gpu.get("gpu"))) is None else index + one.gpus,
            "workers": [rank + one.workers for rank in listed(gpu.get("workers"))],
        }
        for gpu in parts(one.session.metadata, "gpus")
    ]


def _costs(sessions: Sequence[Session]) -> dict[str, Any]:
    costs = [part(session.metadata, "cost") for session in sessions]
    lag = "collector_lag_sec"
    names = dict.fromkeys(name for cost in costs for name in cost if name != lag)
    lags = [found for cost in costs if (found := number(cost.get(lag))) is not None]
    return {
        **{name: _sum(cost.get(name) for cost in costs) for name in names},
        lag: max(lags, default=None),
    }


def _sum(values: Iterable[Any]) -> float | int:
    known: list[float] = [value for value in values if number(value) is not None]
    return sum(known)
