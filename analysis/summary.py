# SPDX-License-Identifier: Apache-2.0
"""One session's answers, all of them, with each table read once."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace

import polars as pl

from analysis.gpu import capture_sizes, captures, cuda_graphs, executions, graph_ledger, memory
from analysis.gpu.capture_sizes import CaptureSizes, DecodeSteps
from analysis.gpu.cuda_graphs import CudaGraphs
from analysis.gpu.graph_ledger import Ledger
from analysis.gpu.memory import Memory
from analysis.judgement import advice, consistency
from analysis.judgement.advice import Advice
from analysis.pool import (
    allocations,
    evictions,
    fragmentation,
    holders,
    kv_groups,
    lifetimes,
    pressure,
    usage,
)
from analysis.pool.allocations import Allocations
from analysis.pool.evictions import Evictions
from analysis.pool.fragmentation import Fragmentation
from analysis.pool.holders import Holders
from analysis.pool.kv_groups import Contents
from analysis.pool.lifetimes import Lifetimes
from analysis.pool.usage import Usage
from analysis.prefix import (
    ages,
    blame,
    families,
    miss_summary,
    misses,
    prefix_cache,
    prompts,
    rent,
    reuse,
    sharing,
    stretches,
)
from analysis.prefix.ages import Ages
from analysis.prefix.blame import Blame
from analysis.prefix.families import Families
from analysis.prefix.miss_summary import MissReasons
from analysis.prefix.prefix_cache import PrefixCache
from analysis.prefix.prompts import Prompts
from analysis.prefix.rent import Rent
from analysis.prefix.sharing import Sharing
from analysis.requests import (
    admission,
    preemption_steps,
    preemptions,
    requests,
    scheduling,
    stints,
    waiting,
)
from analysis.requests.admission import Admission
from analysis.requests.preemptions import Preemptions
from analysis.requests.requests import Requests
from analysis.requests.scheduling import Scheduling
from analysis.requests.waiting import Waiting
from analysis.tables import facts
from analysis.tables.facts import Cost, Facts
from analysis.tables.session import Session, State


@dataclass(frozen=True)
class About:
    """Which session, and how far it goes. ``duration_sec``: from its beginning to the last event
    that is in its tables; what came before ``begin_sec`` is left out of every figure but the
    cost, as warm-up; ``note``: what is special about one that is not complete."""

    directory: str
    session_id: str
    state: State
    note: str | None
    started_at: str | None
    ended_at: str | None
    duration_sec: float
    begin_sec: float


@dataclass(frozen=True)
class Summary:
    """What ``analysis.summarize`` finds. Each part documents its figures and their units."""

    session: About
    warnings: tuple[str, ...]
    facts: Facts
    usage: Usage
    allocations: Allocations
    lifetimes: Lifetimes
    evictions: Evictions
    groups: tuple[Contents, ...]
    ages: Ages
    blame: Blame
    sharing: Sharing
    rent: Rent
    prefix_cache: PrefixCache
    misses: MissReasons
    families: Families
    requests: Requests
    preemptions: Preemptions
    admission: Admission
    waiting: Waiting
    scheduling: Scheduling
    holders: Holders | None
    fragmentation: Fragmentation | None
    cuda_graphs: CudaGraphs
    graph_ledger: Ledger | None
    capture_sizes: CaptureSizes | None
    memory: Memory
    cost: Cost
    advice: tuple[Advice, ...] = ()


def summarize(session: Session) -> Summary:
    """Everything that the session's tables tell about its KV cache and its CUDA graphs.

    Raises:
        SessionError: a table cannot be read, or a line of it is malformed.

    """
    # What needs no table goes beside reading the next one: Polars lets go of the GIL.
    with ThreadPoolExecutor(1) as beside:
        return _summarize(session, beside)


def _summarize(session: Session, beside: Executor) -> Summary:
    known = facts.read(session)
    used = usage.measure(session)
    known_prompts, begun = _read_requests(session)
    prefix_families = beside.submit(begun.result, session, known)
    stepped = _stepped(session, known, used)
    known_runs = stints.named(session, known_prompts)
    # Of small tables, while contents are compared.
    hits = beside.submit(prefix_cache.measure, session)
    admitted = beside.submit(admission.measure, session, known, used, stepped.preempting)
    fragmented = beside.submit(fragmentation.measure, session, known, used)
    preempted = preemptions.victims(known_runs, known_prompts, session.begin_sec)
    watched = _Watched(evictions.Counted(session.begin_sec), preemptions.Taken(preempted))
    in_common = stretches.shared(known_prompts)
    missed = misses.missed(known_prompts, in_common)
    # They have a row for every block of every request, and go before more comes.
    known_prompts = known_prompts.without_contents()
    used_again = reuse.shared(known_prompts, in_common)
    returned = reuse.returns(used_again)
    lost, lived = _read_evictions(session, misses.Evicted(misses.wanted(missed)), watched)
    moved = allocations.Counted()
    held = rent.Held(known_runs, session.begin_sec, session.end_sec)
    handed_out = miss_summary.HandedOut()
    reading = beside.submit(_read_allocations, session, moved, (held, handed_out, stepped.holders))
    missed = misses.classify(
        missed,
        known_prompts,
        in_common,
        lost,
        group=known.full_attention_group,
        drops_hit_block=bool(known.scheduler.drops_hit_unit),
    )
    # Likewise a row for every block that was lost.
    del lost
    for_capacity = evictions.missed_for_capacity(missed, known_prompts.asked)
    missed = missed.select(miss_summary.BLOCK_COLUMNS)
    evicted = watched.counted.result(session, known, used, for_capacity)
    blamed = blame.measure(
        for_capacity, known_prompts, used_again, returned, watched.counted.by_evictor()
    )
    del for_capacity
    shared = sharing.measure(session, known_prompts, used_again, used)
    reading.result()
    contents = sharing.distinct(known_prompts, used_again)
    useful = miss_summary.useful(known, used, known_prompts, contents)
    explained = beside.submit(
        miss_summary.measure, known_prompts, missed, handed_out.result(), useful
    )
    graphs = _graphs(session, known, stepped.decodes)
    found = Summary(
        session=_about(session),
        warnings=facts.warnings(session),
        facts=known,
        usage=used,
        allocations=moved.result(),
        lifetimes=lived,
        evictions=evicted,
        groups=kv_groups.measure(session, known),
        ages=ages.measure(used_again, lived),
        blame=blamed,
        sharing=shared,
        rent=rent.measure(
            session, known, known_prompts, used_again, returned, held, watched.counted.kept()
        ),
        prefix_cache=hits.result(),
        requests=requests.measure(session),
        preemptions=preemptions.measure(
            session, known, preempted, watched.taken, stepped.preempting
        ),
        admission=admitted.result(),
        waiting=stepped.waiting,
        scheduling=stepped.scheduling,
        holders=stepped.holders.result(),
        fragmentation=fragmented.result(),
        cuda_graphs=graphs.use,
        graph_ledger=graphs.ledger,
        capture_sizes=graphs.sizes,
        memory=graphs.memory,
        cost=facts.cost(session),
        families=prefix_families.result(),
        misses=explained.result(),
    )
    doubts = consistency.contradictions(found)
    found = replace(found, warnings=(*found.warnings, *doubts))
    return replace(found, advice=advice.advise(found, doubtful=bool(doubts)))


@dataclass(frozen=True)
class _Stepped:
    """What needs the pools' states, which go before more is read."""

    waiting: Waiting
    scheduling: Scheduling
    holders: holders.Collected
    decodes: DecodeSteps
    preempting: preemption_steps.Steps


def _stepped(session: Session, known: Facts, used: Usage) -> _Stepped:
    """Go through scheduler_steps.csv once; warm-up's lookups tell who waited after it."""
    pools = pressure.states(session)
    waited = waiting.Collected(session, known, used, pools)
    scheduled = scheduling.Collected(session, pools)
    decodes = DecodeSteps()
    preempted = preemption_steps.Steps(session.begin_sec)
    columns = dict.fromkeys(
        [
            *waiting.COLUMNS,
            *scheduling.COLUMNS,
            *capture_sizes.COLUMNS,
            *preemption_steps.COLUMNS,
        ]
    )
    for batch in session.batches(waiting.TABLE, list(columns), history=True):
        waited.add(batch)
        preempted.add(batch)
        counted = batch.filter(pl.col("timestamp_sec") >= session.begin_sec)
        scheduled.add(counted)
        decodes.add(counted)
    return _Stepped(
        waited.result(),
        scheduled.result(),
        holders.Collected(session, known, used, pools),
        decodes,
        preempted,
    )


@dataclass(frozen=True)
class _Graphs:
    """What is told of the GPU."""

    use: CudaGraphs
    ledger: Ledger | None
    sizes: CaptureSizes | None
    memory: Memory


def _graphs(session: Session, known: Facts, decodes: DecodeSteps) -> _Graphs:
    """Read the tables of CUDA graphs and of GPU memory, each once."""
    captured, ran = captures.read(session), executions.read(session)
    used = cuda_graphs.measure(session, ran, captures.sizes(captured))
    held = memory.measure(session, known)
    return _Graphs(
        used,
        graph_ledger.measure(session, known, held, captured, ran),
        capture_sizes.measure(known, used.setup.capture_sizes, captured, ran, decodes),
        held,
    )


def _read_requests(session: Session) -> tuple[Prompts, families.Collected]:
    """Go through requests.jsonl once; what was asked for in the warm-up explains what was found
    after it."""
    prompted, begun = prompts.Collected(), families.Collected()
    columns = dict.fromkeys([*prompts.COLUMNS, *families.COLUMNS])
    for batch in session.batches(prompts.TABLE, list(columns), history=True):
        prompted.add(batch)
        begun.add(batch.filter(pl.col("timestamp") >= 1e3 * session.begin_sec))
    return prompted.result(session), begun


def _read_allocations(
    session: Session,
    moved: allocations.Counted,
    others: tuple[rent.Held, miss_summary.HandedOut, holders.Collected],
) -> None:
    """Go through kv_cache_allocations.csv once; what requests got in the warm-up they may hold
    after it."""
    columns = dict.fromkeys(
        [*allocations.COLUMNS, *rent.COLUMNS, *miss_summary.COLUMNS, *holders.COLUMNS]
    )
    for batch in session.batches(allocations.TABLE, list(columns), history=True):
        moved.add(batch.filter(pl.col("timestamp_sec") >= session.begin_sec))
        for collector in others:
            collector.add(batch)


@dataclass(frozen=True)
class _Watched:
    """What sees the evictions of the session, warm-up left out."""

    counted: evictions.Counted
    taken: preemptions.Taken


def _read_evictions(
    session: Session, lost: misses.Evicted, watched: _Watched
) -> tuple[pl.DataFrame, Lifetimes]:
    """The evictions that decide why blocks were missed, and how long blocks lived.

    It goes through kv_cache_evictions.csv once: it is the largest table. What was lost during
    warm-up explains misses after it.
    """
    lived = lifetimes.Collected()
    collectors = (lived, watched.counted, watched.taken)
    columns = dict.fromkeys(
        [
            *lifetimes.COLUMNS,
            *evictions.COLUMNS,
            *misses.EVICTION_COLUMNS,
            *preemptions.EVICTION_COLUMNS,
        ]
    )
    for batch in session.batches(evictions.TABLE, list(columns), history=True):
        lost.add(batch)
        counted = batch.filter(pl.col("timestamp_sec") >= session.begin_sec)
        for collector in collectors:
            collector.add(counted)
    lifetimes_found = lived.result()
    return lost.result(), lifetimes_found


def _about(session: Session) -> About:
    def text(name: str) -> str | None:
        value = session.metadata.get(name)
        return None if value is None else str(value)

    return About(
        directory=str(session.directory.absolute()),
        session_id=text("session_id") or session.directory.absolute().name,
        state=session.state,
        note=session.note,
        started_at=text("started_at"),
        ended_at=text("ended_at"),
        duration_sec=session.end_sec,
        begin_sec=session.begin_sec,
    )
