# SPDX-License-Identifier: Apache-2.0
"""totals.json: what the figures of the whole run are by now. ``docs/totals.md`` describes it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from profilemate.collector.engine import Engine
from profilemate.collector.metadata import iso
from profilemate.collector.producer import Producer
from profilemate.collector.totals import Totals
from profilemate.collector.worker import Worker
from profilemate.format import totals
from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder
from profilemate.format.session import Founding


def content(
    founding: Founding,
    producers: Sequence[Producer],
    counted: Totals,
    collector: totals.Collector,
    *,
    ended: bool,
) -> totals.RunTotals:
    """All of ``totals.json``.

    Args:
        founding: what the session's first process settled.
        producers: every process that wrote a journal, in the order of their names.
        counted: the figures.
        collector: how the collector fares.
        ended: every producer is gone, and all that it wrote is counted.

    """
    known = [producer for producer in producers if producer.state is not None]
    until = max((p.state.last_ns for p in known if p.state), default=founding.origin_ns)
    versions: dict[str, str] = next(
        (p.header["versions"] for p in known if "versions" in p.header), {}
    )
    return {
        "format_version": totals.FORMAT_VERSION,
        "session_id": founding.session_id,
        "started_at": iso(founding.started_at),
        "until_ns": until - founding.origin_ns,
        "ended": ended,
        "versions": versions,
        "peak_held_blocks": counted.held.peak,
        "engines": _engines(known, counted, until),
        "workers": _workers(known, counted),
        "gpus": [counted.gpus[gpu] for gpu in sorted(counted.gpus)],
        "processes": [_process(producer, founding.origin_ns, ended) for producer in producers],
        "collector": collector,
    }


def write(folder: Folder, found: totals.RunTotals) -> None:
    """Write the file, whole or not at all."""
    folder.write(totals.TOTALS_FILE, as_bytes(found))


def as_bytes(found: totals.RunTotals) -> bytes:
    """totals.json."""
    return json.dumps(found, separators=(",", ":")).encode() + b"\n"


def earlier_gpus(folder: Folder) -> dict[int, totals.Gpu]:
    """The samples of a session that is completed afterwards: they are in no journal."""
    try:
        return {gpu["gpu"]: gpu for gpu in totals.read(folder)["gpus"]}
    except (SessionError, LookupError, TypeError):
        return {}


def _engines(known: Sequence[Producer], counted: Totals, until: int) -> list[totals.Engine]:
    engines = {p.state.rank: p for p in known if isinstance(p.state, Engine)}
    return [
        counted.engines[rank].content(rank, engines[rank].lost, until) for rank in sorted(engines)
    ]


def _workers(known: Sequence[Producer], counted: Totals) -> list[totals.Worker]:
    workers = {p.state.rank: p.state for p in known if isinstance(p.state, Worker)}
    return [
        {
            "worker": rank,
            "executions": counted.workers[rank].content(),
            "experts": counted.workers[rank].experts(),
            "replays": [
                {
                    "mode": mode,
                    "part": part,
                    "replays": replays,
                    "dummy": dummy,
                    "launch_ns": launch_ns,
                }
                for (mode, part), sums in sorted(workers[rank].replays().items())
                for replays, dummy, launch_ns in [sums]
            ],
        }
        for rank in sorted(workers)
    ]


def _process(producer: Producer, origin_ns: int, ended: bool) -> totals.Process:
    header, status = producer.header, producer.status
    recording = _recording(producer, ended)
    paused_ns = producer.state.pauses.since if producer.state and recording == "paused" else None
    return {
        "role": str(header.get("producer") or ""),
        "rank": int(header.get("rank") or 0),
        "recording": recording,
        "paused_since_ns": None if paused_ns is None else paused_ns - origin_ns,
        "dropped_events": status.get("dropped_events", 0),
        "mismatches": producer.state.mismatches if producer.state is not None else 0,
        "hook_ns": status.get("hook_ns", 0),
        "writing_ns": status.get("writing_ns", 0),
        "writes": status.get("flushes", 0),
        "journal_bytes": status.get("bytes", 0),
    }


def _recording(producer: Producer, ended: bool) -> str:
    """One of ``totals.RECORDING``."""
    if producer.status.get("failed"):
        return "stopped"
    if ended or not producer.alive:
        return "ended"
    return "paused" if producer.state is not None and producer.state.pauses.is_now else "on"
