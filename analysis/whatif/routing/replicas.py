# SPDX-License-Identifier: Apache-2.0
"""Which requests did all replicas get together, in which order, and what did they stick by?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from analysis.errors import SessionError
from analysis.tables import labels
from analysis.tables.metadata import flag, parts, text, wall_clock, whole
from analysis.tables.schema import TABLES
from analysis.tables.session import Session
from analysis.whatif import fast
from analysis.whatif.drops import Drops
from analysis.whatif.ids import Ids, Ints, offsets
from analysis.whatif.workload import Workload, of_session

TABLE = TABLES["requests"]

CONTENTS_KEY = "contents_key"
"""The key of metadata.json that is the same where contents of two sessions have the same ids."""

NO_LABEL = -1

MOST = 4096
"""Replicas."""


@dataclass(frozen=True)
class Recorded:
    """The requests of all replicas, in the order in which they arrived.

    ``workload``: its ``engine`` is the number of the replica that served the request, and its times
    begin with the session that began first. ``names``: of each replica. ``num_blocks``: usable
    blocks of each replica, None where not known. ``label``: for each request a number for the name
    that the user's rules give it, ``NO_LABEL`` for none. ``notes``: what to keep in mind.
    ``is_measured``: whether replicas really served them, and not one trace.
    """

    workload: Workload
    names: tuple[str, ...]
    num_blocks: tuple[int | None, ...]
    label: Ints
    notes: tuple[str, ...] = ()
    is_measured: bool = True


def of_trace(workload: Workload) -> Recorded:
    """The requests of a trace, which says nothing of replicas."""
    return Recorded(
        workload=workload,
        names=(),
        num_blocks=(),
        label=np.full(len(workload), NO_LABEL),
        notes=workload.notes,
        is_measured=False,
    )


def of_sessions(sessions: Sequence[Session]) -> Recorded:
    """The requests of these sessions. Each of their engines is a replica.

    Raises:
        SessionError: a table cannot be read, no request ended, the contents of the replicas cannot
            be compared, or a session does not say when it began.

    """
    _check_keys(sessions)
    loads = [of_session(session) for session in sessions]
    _check_loads(sessions, loads)
    ranks = [_ranks(session, load) for session, load in zip(sessions, loads, strict=True)]
    begins = _begins(sessions)
    label = _labels(sessions, loads)
    firsts = offsets(np.array([len(own) for own in ranks], np.int64)).tolist()
    names: list[str] = []
    shifted = []
    for session, load, own, first, begin in zip(
        sessions, loads, ranks, firsts[:-1], begins, strict=True
    ):
        shifted.append(_moved(load, {rank: first + at for at, rank in enumerate(own)}, begin))
        name = session.directory.name
        names += [name] if len(own) == 1 else [f"{name}, engine {rank}" for rank in own]
    joined = _joined(shifted)
    order = np.argsort(joined.arrival_sec, kind="stable")
    return Recorded(
        workload=joined.take(order),
        names=tuple(names),
        num_blocks=tuple(
            load.measured.num_blocks if load.measured else None
            for load, own in zip(loads, ranks, strict=True)
            for _ in own
        ),
        label=label[order],
        notes=(
            *dict.fromkeys(note for load in loads for note in _own_notes(load)),
            *_apart(shifted),
        ),
    )


def _check_keys(sessions: Sequence[Session]) -> None:
    """Contents of several sessions compare under one key."""
    keys = [text(session.metadata.get(CONTENTS_KEY)) for session in sessions]
    if len(sessions) < 2 or (keys[0] is not None and len(set(keys)) == 1):
        return
    without = next((at for at, key in enumerate(keys) if key is None), None)
    if without is not None:
        why = text(sessions[without].metadata.get("contents_apart_because"))
        because = f" ({why})" if why else ""
        raise SessionError(
            f"{sessions[without].directory} has contents that are its own alone{because}, so no "
            f"other replica's compare with them; record every replica with {_KEY_VARIABLE} set to "
            "the same key"
        )
    other = next(at for at, key in enumerate(keys) if key != keys[0])
    raise SessionError(
        f"{sessions[other].directory} and {sessions[0].directory} have contents that do not "
        f"compare: another key, model or block size; record every replica with the same model, "
        f"block size and {_KEY_VARIABLE}"
    )


_KEY_VARIABLE = "VLLM_PROFILING_CONTENT_KEY"


def _check_loads(sessions: Sequence[Session], loads: Sequence[Workload]) -> None:
    for session, load in zip(sessions, loads, strict=True):
        if not load.has_contents:
            raise SessionError(
                f"{session.directory} does not have the contents of its requests, since prefix "
                "caching was off; record it with it on"
            )
        if load.block_size != loads[0].block_size:
            raise SessionError(
                f"{session.directory} has contents of {load.block_size:,} tokens, and "
                f"{sessions[0].directory} of {loads[0].block_size:,}; give replicas with blocks of "
                "one size"
            )
        shared = flag(session.metadata.get("content_ids_shared"))
        has_key = text(session.metadata.get(CONTENTS_KEY)) is not None
        if len(load.engines) > 1 and not (shared or has_key):
            raise SessionError(
                f"{session.directory}: the contents of its {len(load.engines)} engines do not "
                "compare; record it with PYTHONHASHSEED=0 in vLLM's environment, or with vLLM 0.29 "
                "or later"
            )


def _ranks(session: Session, load: Workload) -> list[int]:
    """The data-parallel ranks of a session, those without a request included."""
    known = {
        whole(process.get("rank")) or 0
        for process in parts(session.metadata, "processes")
        if process.get("role") == "engine"
    }
    return sorted(known | set(load.engines))


def _begins(sessions: Sequence[Session]) -> list[float]:
    """When each session began, in seconds after the first one."""
    if len(sessions) == 1:
        return [0.0]
    found = []
    for session in sessions:
        began = wall_clock(session.metadata.get("started_at"))
        if began is None:
            raise SessionError(
                f"{session.directory}: metadata.json does not say when it began (started_at), so "
                "its requests have no place among the others'; restore the recorded file"
            )
        found.append(began)
    return [began - min(found) for began in found]


def _labels(sessions: Sequence[Session], loads: Sequence[Workload]) -> Ints:
    """A number for the user's name of each request, one session after the other."""
    numbers: dict[str, int] = {}
    found = [np.empty(0, np.int64)]
    for session, load in zip(sessions, loads, strict=True):
        own = np.full(len(load), NO_LABEL)
        if session.labels:
            rows = pl.concat(
                batch.select(TABLE.time, "request_id")
                for batch in session.batches(TABLE.name, (TABLE.time, "request_id"), history=True)
            ).sort(TABLE.time, maintain_order=True)
            ids = rows["request_id"].fill_null("").to_list()
            names = labels.names(session.labels, set(ids))
            for at, request_id in enumerate(ids):
                if (name := names.get(request_id)) is not None:
                    own[at] = numbers.setdefault(name, len(numbers))
        found.append(own)
    return np.concatenate(found)


def _moved(load: Workload, replica: Mapping[int, int], begin_sec: float) -> Workload:
    """The same requests by the numbers of their replicas, on the clock of all sessions."""

    def number(engine: Ints) -> Ints:
        return np.array([replica[one] for one in engine.tolist()], np.int64)

    known = np.isin(load.drops.engine, list(replica))
    drops = load.drops.take(known)
    times = {
        name: getattr(load, name) + begin_sec
        for name in ("arrival_sec", "seen_sec", "admitted_sec", "first_token_sec", "finish_sec")
    }
    return replace(
        load,
        **times,
        engine=number(load.engine),
        drops=replace(drops, at_sec=drops.at_sec + begin_sec, engine=number(drops.engine)),
    )


def _joined(loads: Sequence[Workload]) -> Workload:
    """The requests of all of these, one after the other."""
    first = loads[0]
    if len(loads) == 1:
        return first
    joined: dict[str, Any] = {
        each.name: np.concatenate([getattr(load, each.name) for load in loads])
        for each in fields(first)
        if isinstance(getattr(first, each.name), np.ndarray)
    }
    unique = 0
    lists: dict[str, list[Ids]] = {"prompt_ids": [], "output_ids": []}
    for load in loads:
        lowest = 0
        for name, found in lists.items():
            ids: Ids = getattr(load, name)
            # What is no content's number occurs nowhere else, in no other session either.
            values = np.where(ids.values < 0, ids.values - unique, ids.values)
            lowest = min(lowest, int(ids.values.min(initial=0)))
            found.append(Ids(values, ids.offsets))
        unique -= lowest
    for name, found in lists.items():
        values = np.concatenate([ids.values for ids in found])
        joined[name] = Ids(values, offsets(np.concatenate([ids.lengths for ids in found])))
    order = np.argsort(np.concatenate([load.drops.at_sec for load in loads]), kind="stable")
    drops = Drops(
        **{
            each.name: np.concatenate([getattr(load.drops, each.name) for load in loads])[order]
            for each in fields(Drops)
        }
    )
    return replace(first, **joined, drops=drops, measured=None, notes=())


def _own_notes(load: Workload) -> Iterator[str]:
    yield from load.notes
    if load.measured is not None:
        yield from fast.session_notes(load.measured.facts, load.block_size)


def _apart(loads: Sequence[Workload]) -> Iterator[str]:
    """A note where sessions did not run at the same time."""
    spans = sorted(
        (float(load.arrival_sec[0]), float(load.arrival_sec[-1]), load.name) for load in loads
    )
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin > end:
            yield (
                f"{other} got its first request after {name} had got its last one: these replicas "
                "did not share a load"
            )
            return
