# SPDX-License-Identifier: Apache-2.0
"""What did a run measure, by its benchmark's own output and by the session that it left?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from analysis.errors import SessionError
from analysis.judgement import measures
from analysis.judgement.summarizing import summarize
from analysis.summary import Summary
from analysis.tables.find import is_session
from analysis.tables.session import Session, open_session
from profilemate.collector import complete_if_ended
from profilemate.sweep.benchmarks import Said, batch_size

SETTLED_SEC = 60
"""How long a session may take to be complete after vLLM has ended."""

_MEASURES = (
    ("hit_rate", "hit_rate"),
    ("waste", "empty_slots"),
    ("preemptions", "preemptions"),
    ("evictions", "evictions"),
    ("usage_peak_pct", "usage_peak"),
    ("gpu_memory_bytes", "gpu_memory_peak"),
)
"""A figure of a run, and the measure of its session that it comes from."""


@dataclass(frozen=True)
class Measured:
    """A session's part of a result. ``figures``: by their names in ``analysis.sweep``.
    ``source``: where the figures per second come from, None where there are none.
    ``input_lengths``: how many requests had a prompt of so many tokens."""

    session: str | None
    figures: Mapping[str, float]
    source: str | None
    requests: Mapping[str, int]
    input_lengths: Mapping[int, int]
    versions: Mapping[str, str]
    device: str | None
    notes: tuple[str, ...]


def measured(folder: Path, said: Said | None, command: Sequence[str]) -> Measured:
    """The measurements of a run whose sessions are in this folder."""
    figures = _said(said)
    source = said.source if said else None
    opened = list(_opened(folder))
    notes = [note for _, note in opened if note]
    found = [(session, summarize(session)) for session, _ in opened if session is not None]
    if not found:
        notes.append(
            "A run left no session that can be read, so it has no figures of its KV cache."
        )
        return Measured(None, figures, source, {}, {}, {}, None, tuple(notes))
    session, summary = max(found, key=lambda pair: pair[1].requests.ended)
    if len(found) > 1:
        notes.append(
            f"A run left {len(found)} sessions; its figures are of the one with the most requests."
        )
    if summary.session.state != "complete":
        notes.append(f"A run's session is {summary.session.state}: {summary.session.note}.")
    if said is not None and said.latency_sec:
        figures.update(_of_a_batch(summary, batch_size(command), said.latency_sec))
    if not any(name.endswith("_per_sec") for name in figures):
        figures.update(_by_the_second(session))
        source = "session" if figures else None
    return Measured(
        session=session.directory.name,
        figures={**figures, **_figures(summary)},
        source=source,
        requests={
            "ended": summary.requests.ended,
            "input_tokens": summary.requests.input_tokens,
            "output_tokens": summary.requests.output_tokens,
        },
        input_lengths=_input_lengths(session),
        versions=summary.facts.versions,
        device=_text(session.metadata.get("device")),
        notes=tuple(notes),
    )


def _opened(folder: Path) -> Iterator[tuple[Session | None, str | None]]:
    """Each session as soon as it is complete, or what is wrong with it."""
    found = sorted(child for child in folder.iterdir() if is_session(child))
    deadline = time.monotonic() + SETTLED_SEC
    for path in found:
        yield _settled(path, deadline)


def _settled(path: Path, deadline: float) -> tuple[Session | None, str | None]:
    try:
        while not complete_if_ended(path) and time.monotonic() < deadline:
            time.sleep(0.1)
        return open_session(path), None
    except SessionError as error:
        return None, str(error)


def _said(said: Said | None) -> dict[str, float]:
    figures = {
        name: getattr(said, name, None)
        for name in (
            "output_tokens_per_sec",
            "total_tokens_per_sec",
            "requests_per_sec",
            "latency_sec",
        )
    }
    return {name: value for name, value in figures.items() if value is not None}


def _of_a_batch(found: Summary, batch: int, latency_sec: float) -> dict[str, float]:
    """Figures per second of ``vllm bench latency``, whose batches all have the same size."""
    ended = found.requests.ended
    if not ended:
        return {}
    output = found.requests.output_tokens / ended
    total = output + found.requests.input_tokens / ended
    return {
        "output_tokens_per_sec": batch * output / latency_sec,
        "total_tokens_per_sec": batch * total / latency_sec,
        "requests_per_sec": batch / latency_sec,
    }


def _by_the_second(session: Session) -> dict[str, float]:
    """Figures per second, from the first arrival to the last end, as the engine saw them."""
    sums = [
        batch.select(
            requests=pl.len().cast(pl.Int64),
            inputs=pl.col("input_length").sum(),
            outputs=pl.col("output_length").sum(),
            first=pl.col("timestamp").min() / 1e3,
            last=pl.col("finish_sec").max(),
        )
        for batch in session.batches(
            "requests", ["timestamp", "input_length", "output_length", "finish_sec"]
        )
    ]
    if not sums:
        return {}
    row = (
        pl.concat(sums)
        .select(
            pl.col("requests", "inputs", "outputs").sum(),
            seconds=pl.col("last").max() - pl.col("first").min(),
        )
        .row(0, named=True)
    )
    if not row["requests"] or not row["seconds"]:
        return {}
    return {
        "output_tokens_per_sec": row["outputs"] / row["seconds"],
        "total_tokens_per_sec": (row["inputs"] + row["outputs"]) / row["seconds"],
        "requests_per_sec": row["requests"] / row["seconds"],
    }


def _input_lengths(session: Session) -> dict[int, int]:
    lengths = session.collect(
        "requests",
        lambda table: table.group_by("input_length").agg(pl.len()).sort("input_length"),
    )
    return dict(lengths.iter_rows())


def _figures(found: Summary) -> dict[str, float]:
    figures: dict[str, float | None] = {
        "blocks": found.facts.pool_blocks,
        "kv_tokens": found.facts.kv_tokens,
    }
    figures |= {name: measures.by_name(measure).of(found) for name, measure in _MEASURES}
    return {name: value for name, value in figures.items() if value is not None}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
