# SPDX-License-Identifier: Apache-2.0
"""metadata.json and kv_cache_summary.txt: what the session was, and how far its tables are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from profilemate.collector import gpu_facts
from profilemate.collector.engine import Engine
from profilemate.collector.gpu_memory import Sampling
from profilemate.collector.producer import Producer
from profilemate.collector.segments import Closed, Segments
from profilemate.collector.tables import Tables
from profilemate.collector.totals import Totals
from profilemate.collector.worker import Worker
from profilemate.format import content_key
from profilemate.format.events import prefix_lengths
from profilemate.format.folder import Folder
from profilemate.format.session import METADATA_FILE, Founding

FORMAT_VERSION = 1
SUMMARY_FILE = "kv_cache_summary.txt"


def write(folder: Folder, content: dict[str, Any], totals: Totals) -> None:
    """Write both files, each whole or not at all.

    Args:
        folder: the session's folder.
        content: of metadata.json.
        totals: the session's totals.

    """
    summary = totals.summary()
    if summary is not None:
        folder.write(SUMMARY_FILE, summary.encode())
    folder.write(METADATA_FILE, as_bytes(content))


def as_bytes(content: Mapping[str, Any]) -> bytes:
    """metadata.json."""
    return json.dumps(content, indent=2).encode() + b"\n"


def content(
    founding: Founding,
    producers: Sequence[Producer],
    tables: Tables,
    sampling: Sampling,
    metrics: dict[str, Any] | None,
    upload: dict[str, Any] | None,
    *,
    segments: Segments,
    snapshots: dict[str, Any] | None,
    clock: dict[str, Any] | None,
    ended: bool,
    lag_sec: float | None = None,
    hurries: int = 0,
) -> dict[str, Any]:
    """All of metadata.json.

    Args:
        founding: what the session's first process settled.
        producers: every process that wrote a journal, in the order of their names.
        tables: the tables.
        sampling: how GPU memory was sampled.
        metrics: where metrics are offered, and what is wrong with it; None where they are not.
        upload: where the session is sent to, and how far; None where it is not.
        segments: the closed parts of the tables.
        snapshots: what was taken by itself, and what was not; None where nothing was asked for.
        clock: how the wall clock went; None where that is not known.
        ended: every producer is gone, and all that it wrote is in the tables.
        lag_sec: the longest that an event took to reach its table; None where not followed.
        hurries: how often the collector was late, and gave way no more.

    """
    engines = [producer for producer in producers if isinstance(producer.state, Engine)]
    workers = [producer for producer in producers if isinstance(producer.state, Worker)]
    workers.sort(key=lambda producer: int(producer.header["rank"]))
    first = engines[0].header if engines else {}
    either = first or (workers[0].header if workers else {})
    dropped = sum(producer.status.get("dropped_events", 0) for producer in producers)
    basis = first.get("content_basis")
    failed = any(
        producer.problem or producer.status.get("failed") or producer.lost for producer in producers
    )
    last = max((p.state.last_ns for p in producers if p.state), default=founding.origin_ns)
    seconds = (last - founding.origin_ns) / 1e9
    return {
        "format_version": FORMAT_VERSION,
        "session_id": founding.session_id,
        "started_at": iso(founding.started_at),
        "ended_at": iso(founding.started_at + seconds) if ended else None,
        "duration_sec": round(seconds, 6),
        "complete": ended and not dropped and not failed,
        "dropped_events": dropped,
        "segments": len(segments.closed),
        "window": window(segments.closed),
        "snapshots": snapshots,
        "deployment": either.get("deployment"),
        "host": founding.host,
        "clock": clock,
        "argv": founding.argv,
        "versions": either.get("versions", {}),
        "device": either.get("device"),
        "processes": [_process(producer, ended, founding.origin_ns) for producer in producers],
        "model": first.get("model"),
        "cache": first.get("cache"),
        "groups": first.get("groups"),
        "parallel": _parallel(engines),
        "scheduler": first.get("scheduler"),
        "settings": first.get("settings"),
        "cuda_graphs": gpu_facts.cuda_graphs(workers),
        "memory": gpu_facts.memory(workers),
        "gpus": gpu_facts.gpus(workers, sampling),
        "gpu_memory": gpu_facts.gpu_memory(workers, sampling),
        "experts": gpu_facts.experts(workers),
        "phases": gpu_facts.phases(engines, workers),
        "content_ids_shared": bool(first.get("content_ids_shared", False)),
        "contents_key": content_key.name_of(founding, basis),
        "contents_apart_because": content_key.apart_because(
            founding, basis, first.get("contents_apart_because")
        ),
        "prefix_lengths": prefix_lengths((first.get("cache") or {}).get("max_model_len") or 0),
        "cost": {
            "hook_sec": sum(p.status.get("hook_ns", 0) for p in producers) / 1e9,
            "writing_sec": sum(p.status.get("writing_ns", 0) for p in producers) / 1e9,
            "writes": sum(p.status.get("flushes", 0) for p in producers),
            "journal_bytes": sum(
                p.status.get("bytes", 0) + p.status.get("earlier_bytes", 0) for p in producers
            ),
            "table_bytes": tables.bytes_written,
            "collector_lag_sec": lag_sec,
            "collector_hurries": hurries,
            "rows_dropped": 0,
        },
        "metrics": metrics,
        "upload": upload,
    }


def _parallel(engines: Sequence[Producer]) -> dict[str, Any] | None:
    """The engines' parallelism. Each rank of a dense model believes that it is the only one."""
    stated = engines[0].header.get("parallel") if engines else None
    if stated is None:
        return None
    ranks = max(int(producer.header["rank"]) for producer in engines) + 1
    return {**stated, "data": max(ranks, stated.get("data") or 1)}


def window(segments: Sequence[Closed]) -> dict[str, Any] | None:
    """What is left of the run where these segments are the first; None where all of it is."""
    if not segments or segments[0].number == 1:
        return None
    first = segments[0]
    return {
        "begin_sec": first.begin_sec,
        "removed_segments": first.number - 1,
        "removed_bytes": first.before_bytes,
    }


def _process(producer: Producer, ended: bool, origin_ns: int) -> dict[str, Any]:
    header, status = producer.header, producer.status
    if producer.ended_well:
        end = "exit"
    elif ended:
        end = "killed"
    else:
        end = "running"
    hooks = [hook for hook in header.get("hooks", []) if hook.get("attached")]
    missing = [
        hook
        for hook in header.get("hooks", [])
        # A process need not have imported every module.
        if not hook.get("attached") and "has not been imported" not in (hook.get("reason") or "")
    ]
    return {
        "pid": header.get("pid"),
        "role": header.get("producer"),
        "rank": header.get("rank"),
        "hooks": [hook["name"] for hook in hooks],
        "hooks_missing": {
            **{hook["name"]: hook.get("reason") for hook in missing},
            **gpu_facts.experts_missing(producer),
        },
        "hooks_failed": status.get("failed", {}),
        "lost": producer.lost,
        "methods": status.get("methods"),
        "problem": producer.problem,
        "mismatches": producer.state.mismatches if producer.state is not None else 0,
        "pauses": producer.state.pauses.seconds(origin_ns) if producer.state is not None else [],
        "ended": end,
    }


def iso(seconds: float) -> str:
    """A moment as ``metadata.json`` writes it."""
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
