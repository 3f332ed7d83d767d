# SPDX-License-Identifier: Apache-2.0
"""What does one session of a fleet add to it?

A partial is small whatever the session's size, and needs nothing but that session: it is made where
the session is, by a process or on a node of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from analysis.errors import SessionError
from analysis.fleet import shared
from analysis.fleet.counts import Counts
from analysis.fleet.shared import Shared
from analysis.pool import usage
from analysis.prefix import misses, prompts, stretches
from analysis.prefix.misses import LossTally
from analysis.prefix.prompts import Prompts
from analysis.requests import preemption_bill, preemption_steps, preemptions, stints
from analysis.requests.preemption_steps import StepTally
from analysis.stats.binned import Binned, of_counts
from analysis.tables import facts, metadata, run_totals
from analysis.tables.facts import Facts
from analysis.tables.find import numbered
from analysis.tables.session import Session, State
from profilemate.format.totals import BANDS, TOTALS_FILE, Engine, Histogram, RunTotals


@dataclass(frozen=True)
class Origin:
    """Which session it is, and whose. What is not known is None.

    ``path``: what it was opened by. ``replica``: the server that left it: its host, with its port
    or its GPUs where they are known, so that a server that was started again is one replica.
    ``release``: of vLLM. ``gpus``: that the session's workers had, or processors where it ran on
    CPUs. ``contents_key``: names the key of its contents, which compare with those of sessions
    that have the same; None where they are its own. ``apart_because``: why they are.
    """

    path: str
    session_id: str
    state: State
    started_at: str | None
    deployment: str | None
    model: str | None
    replica: str
    host: str | None
    release: str | None
    gpus: int
    contents_key: str | None
    apart_because: str | None


@dataclass(frozen=True)
class Partial:
    """One session's share of the fleet's figures. ``warnings``: what is missing from its data.
    ``shared``: its contents, where they compare with those of other sessions."""

    origin: Origin
    counts: Counts
    warnings: tuple[str, ...]
    shared: Shared | None = None


def of_session(session: Session, path: str) -> Partial:
    """The session's share. ``path``: what the user, or a folder's listing, calls it.

    Raises:
        SessionError: it has no totals.json, a table cannot be read, or a line of it is malformed.

    """
    totals = run_totals.whole(session.directory)
    if totals is None:
        raise SessionError(
            f"{session.directory} has no {TOTALS_FILE} that this release reads; 'profilemate "
            "finalize' makes it where the journal is still there"
        )
    known = facts.read(session)
    origin = _origin(session, path, known)
    asked = prompts.read(session)
    counts = _with_tables(session, known, asked, _of_run(totals, session), origin.gpus)
    key = origin.contents_key
    joined = None if key is None else shared.of_session(session, known, asked, key)
    return Partial(origin, counts, facts.warnings(session), joined)


def _origin(session: Session, path: str, known: Facts) -> Origin:
    said = session.metadata
    session_id = metadata.text(said.get("session_id")) or session.directory.absolute().name
    return Origin(
        path=path,
        session_id=session_id,
        state=session.state,
        started_at=metadata.text(said.get("started_at")),
        deployment=metadata.text(said.get("deployment")),
        model=known.model,
        replica=_replica(said, known, session_id),
        host=known.host,
        release=known.versions.get("vllm"),
        gpus=_gpus(said, known),
        contents_key=metadata.text(said.get("contents_key")),
        apart_because=metadata.text(said.get("contents_apart_because")),
    )


def _replica(said: Mapping[str, Any], known: Facts, session_id: str) -> str:
    if known.host is None:
        return session_id
    number = numbered(session_id)
    sibling = f"#{number}" if number > 1 else ""
    port = _port([each for each in metadata.listed(said.get("argv")) if isinstance(each, str)])
    if port is not None:
        return f"{known.host}:{port}{sibling}"
    gpus = metadata.parts(said, "gpus")
    places = [place for gpu in gpus if (place := metadata.whole(gpu.get("gpu"))) is not None]
    if places and len(places) == len(gpus):
        return f"{known.host}/gpu{','.join(map(str, sorted(places)))}{sibling}"
    return f"{known.host}{sibling}"


def _port(argv: Sequence[str]) -> str | None:
    """The value of ``--port``; None where it is not there, or no number."""
    for place, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name == "--port":
            given = value or (argv[place + 1] if place + 1 < len(argv) else "")
            return given if given.isascii() and given.isdigit() else None
    return None


def _gpus(said: Mapping[str, Any], known: Facts) -> int:
    """One for each worker; without workers in the record, what the engines are configured for."""
    workers = {
        metadata.whole(process.get("rank"))
        for process in metadata.parts(said, "processes")
        if process.get("role") == "worker"
    }
    if workers:
        return len(workers)
    return (
        max(1, len(known.engines)) * (known.tensor_parallel or 1) * (known.pipeline_parallel or 1)
    )


def _of_run(totals: RunTotals, session: Session) -> Counts:
    """The figures of the whole run."""
    engines = totals["engines"]
    caches = [engine["prefix_cache"] for engine in engines]
    asked = [engine["requests"] for engine in engines]
    pools = [pool for engine in engines for pool in engine["pools"]]
    evicted = [each for pool in pools for each in pool["evictions"]]
    return Counts(
        sessions=1,
        windows=int(session.window is not None or session.period is not None),
        run_ns=totals["until_ns"],
        admitted=sum(cache["requests"] for cache in caches),
        admitted_hit=sum(cache["requests_hit"] for cache in caches),
        query_tokens=sum(cache["query_tokens"] for cache in caches),
        hit_tokens=sum(cache["hit_tokens"] for cache in caches),
        ended=sum(sum(each["finished"].values()) for each in asked),
        prompt_tokens=sum(each["prompt_tokens"] for each in asked),
        output_tokens=sum(each["output_tokens"] for each in asked),
        preemptions=sum(each["preemptions"] for each in asked),
        evicted_blocks=sum(each["blocks"] for each in evicted),
        never_reused_blocks=sum(each["never_reused"] for each in evicted),
        band_ns=tuple(sum(pool["band_ns"].get(band, 0) for pool in pools) for band in BANDS),
        queue=_together(session, engines, lambda one: one["requests"]["queue"]),
        first_token=_together(session, engines, lambda one: one["requests"]["first_token"]),
        duration=_together(session, engines, lambda one: one["requests"]["duration"]),
        lifetime=_together(session, engines, lambda one: one["blocks"]["lifetime"]),
        idle=_together(session, engines, lambda one: one["blocks"]["idle"]),
    )


def _together(
    session: Session, engines: Sequence[Engine], histogram: Callable[[Engine], Histogram]
) -> Binned:
    total = Binned()
    for engine in engines:
        one = histogram(engine)
        binned = of_counts(one["bounds"], one["counts"], one["sum"])
        if binned is None:
            raise SessionError(
                f"{session.directory / TOTALS_FILE} has histograms with other bounds than this "
                "release's; use the release that recorded it"
            )
        total += binned
    return total


def _with_tables(
    session: Session, known: Facts, asked: Prompts, counts: Counts, gpus: int
) -> Counts:
    """The same with the figures that only the tables have."""
    table_us = round((session.end_sec - session.begin_sec) * 1e6)
    stepped = preemption_steps.read(session)
    held, cached, free = _pool_time(session)
    return replace(
        counts,
        table_us=table_us,
        gpu_us=table_us * gpus,
        scheduled_tokens=stepped.scheduled_tokens,
        recomputed_tokens=_recomputed(session, known, asked),
        preemption_tokens=_preempted(session, known, asked, stepped),
        held_us=held,
        cached_us=cached,
        free_us=free,
    )


def _recomputed(session: Session, known: Facts, asked: Prompts) -> int:
    """Prompt tokens that were computed again, as their blocks had been evicted for room."""
    common = stretches.in_common(asked)
    missed = misses.missed_blocks(asked, common)
    lost = LossTally(misses.content_ids(missed))
    if not missed.is_empty():
        for batch in session.batches(_EVICTIONS, misses.EVICTION_COLUMNS, history=True):
            lost.add(batch)
    known_why = misses.classify(
        missed,
        asked.without_contents(),
        common,
        lost.result(),
        group=known.full_attention_group,
        drops_hit_block=bool(known.scheduler.drops_hit_unit),
    )
    evicted = known_why.filter(pl.col("reason") == "capacity")
    sized = evicted.join(asked.asked.select("lookup", "block_size"), on="lookup")
    return int(sized["block_size"].sum())


_EVICTIONS = "kv_cache_evictions"


def _preempted(session: Session, known: Facts, asked: Prompts, stepped: StepTally) -> int:
    """Tokens that were computed again because their request had been preempted."""
    if not stepped.preempted:
        return 0
    ran = stints.with_lookups(session, asked)
    preempted = preemptions.victims(ran, asked, session.begin_sec)
    priced = preemption_bill.measure(session, known, preempted, stepped)
    return int(priced["recomputed"].sum())


def _pool_time(session: Session) -> tuple[int, int, int]:
    """Blocks that were held, cached and free, times the microseconds for which they were."""
    held = cached = free = 0
    for spans in _spans(session):
        sums = spans.select((pl.col(_STATES).cast(pl.Int128) * pl.col("us")).sum()).row(0)
        held, cached, free = held + sums[0], cached + sums[1], free + sums[2]
    return held, cached, free


_STATES = ["num_blocks", "cached_blocks", "free_blocks"]
_POOL = ["engine", "pool"]


def _spans(session: Session) -> Iterator[pl.DataFrame]:
    """The pools' states, and for how many microseconds (``us``) each held, without the warm-up."""
    columns = ["timestamp_sec", *_STATES, *_POOL]
    begin = round(session.begin_sec * 1e6)
    last: pl.DataFrame | None = None
    for batch in session.batches(usage.TABLE, columns, history=True):
        rows = batch if last is None else pl.concat([last, batch])
        yield _held_for(rows, begin)
        last = rows.group_by(_POOL, maintain_order=True).last().select(columns)
    if last is not None:
        ends = last.with_columns(timestamp_sec=pl.lit(session.end_sec))
        yield _held_for(pl.concat([last, ends]), begin)


def _held_for(rows: pl.DataFrame, begin_us: int) -> pl.DataFrame:
    at = (pl.col("timestamp_sec") * 1e6).round().cast(pl.Int64).clip(lower_bound=begin_us)
    return (
        rows.with_columns(at=at)
        .with_columns(us=(pl.col("at").shift(-1).over(_POOL) - pl.col("at")).clip(lower_bound=0))
        .drop_nulls("us")
    )
