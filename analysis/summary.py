# SPDX-License-Identifier: Apache-2.0
"""One session's answers, all of them, with each table read once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import polars as pl

from analysis import (
    admission,
    advice,
    ages,
    allocations,
    blame,
    consistency,
    evictions,
    facts,
    families,
    fragmentation,
    groups,
    holders,
    lifetimes,
    miss_reasons,
    misses,
    preemptions,
    prefix_cache,
    pressure,
    prompts,
    rent,
    requests,
    runs,
    scheduling,
    sharing,
    usage,
    uses,
    waiting,
)
from analysis.admission import Admission
from analysis.advice import Advice
from analysis.ages import Ages
from analysis.allocations import Allocations
from analysis.blame import Blame
from analysis.evictions import Evictions
from analysis.facts import Cost, Facts
from analysis.families import Families
from analysis.fragmentation import Fragmentation
from analysis.groups import Contents
from analysis.holders import Holders
from analysis.lifetimes import Lifetimes
from analysis.miss_reasons import MissReasons
from analysis.preemptions import Preemptions
from analysis.prefix_cache import PrefixCache
from analysis.prompts import Prompts
from analysis.rent import Rent
from analysis.requests import Requests
from analysis.scheduling import Scheduling
from analysis.session import Session, State
from analysis.sharing import Sharing
from analysis.usage import Usage
from analysis.waiting import Waiting


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
    cost: Cost
    advice: tuple[Advice, ...] = ()


def summarize(session: Session) -> Summary:
    """Everything that the session's tables tell about its KV cache.

    Raises:
        SessionError: a table cannot be read, or a line of it is malformed.

    """
    known = facts.read(session)
    used = usage.measure(session)
    stepped = _stepped(session, known, used)
    known_prompts, prefix_families = _read_requests(session, known)
    known_runs = runs.named(session, known_prompts)
    preempted = preemptions.victims(known_runs, known_prompts, session.begin_sec)
    watched = _Watched(
        evictions.Counted(), preemptions.Taken(preempted), rent.Kept(session.begin_sec)
    )
    missed, lived = _read_evictions(session, known, known_prompts, watched)
    moved = allocations.Counted()
    held = rent.Held(known_runs, session.begin_sec, session.end_sec)
    handed_out = miss_reasons.HandedOut()
    _read_allocations(session, moved, (held, handed_out, stepped.holders))
    reasons = miss_reasons.measure(known_prompts, missed, handed_out.result())
    for_capacity = evictions.missed_for_capacity(missed, known_prompts.asked)
    # Each has a row for every block that was missed, or every step: they go before more comes.
    del missed, handed_out
    used_again = uses.shared(known_prompts)
    returned = uses.returns(used_again)
    found = Summary(
        session=_about(session),
        warnings=facts.warnings(session),
        facts=known,
        usage=used,
        allocations=moved.result(),
        lifetimes=lived,
        evictions=watched.counted.result(session, known, for_capacity),
        groups=groups.measure(session, known),
        ages=ages.measure(used_again, lived),
        blame=blame.measure(
            for_capacity, known_prompts, used_again, returned, watched.counted.by_evictor()
        ),
        sharing=sharing.measure(session, known_prompts, used_again, used),
        rent=rent.measure(session, known, known_prompts, used_again, returned, held, watched.kept),
        prefix_cache=prefix_cache.measure(session),
        misses=reasons,
        families=prefix_families,
        requests=requests.measure(session),
        preemptions=preemptions.measure(session, known, preempted, watched.taken),
        admission=admission.measure(session, known, used),
        waiting=stepped.waiting,
        scheduling=stepped.scheduling,
        holders=stepped.holders.result(),
        fragmentation=fragmentation.measure(session, known, used),
        cost=facts.cost(session),
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


def _stepped(session: Session, known: Facts, used: Usage) -> _Stepped:
    """Go through scheduler_steps.csv once; warm-up's lookups tell who waited after it."""
    pools = pressure.states(session)
    waited = waiting.Collected(session, known, used, pools)
    scheduled = scheduling.Collected(session, pools)
    columns = dict.fromkeys([*waiting.COLUMNS, *scheduling.COLUMNS])
    for batch in session.batches(waiting.TABLE, list(columns), history=True):
        waited.add(batch)
        scheduled.add(batch.filter(pl.col("timestamp_sec") >= session.begin_sec))
    return _Stepped(
        waited.result(),
        scheduled.result(),
        holders.Collected(session, known, used, pools),
    )


def _read_requests(session: Session, known: Facts) -> tuple[Prompts, Families]:
    """Go through requests.jsonl once; what was asked for in the warm-up explains what was found
    after it."""
    prompted, begun = prompts.Collected(), families.Collected()
    columns = dict.fromkeys([*prompts.COLUMNS, *families.COLUMNS])
    for batch in session.batches(prompts.TABLE, list(columns), history=True):
        prompted.add(batch)
        begun.add(batch.filter(pl.col("timestamp") >= 1e3 * session.begin_sec))
    return prompted.result(session), begun.result(session, known)


def _read_allocations(
    session: Session,
    moved: allocations.Counted,
    others: tuple[rent.Held, miss_reasons.HandedOut, holders.Collected],
) -> None:
    """Go through kv_cache_allocations.csv once; what requests got in the warm-up they may hold
    after it."""
    columns = dict.fromkeys(
        [*allocations.COLUMNS, *rent.COLUMNS, *miss_reasons.COLUMNS, *holders.COLUMNS]
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
    kept: rent.Kept


def _read_evictions(
    session: Session, known: Facts, known_prompts: Prompts, watched: _Watched
) -> tuple[pl.DataFrame, Lifetimes]:
    """The missed blocks with their reasons, and how long blocks lived.

    It goes through kv_cache_evictions.csv once: it is the largest table. What was lost during
    warm-up explains misses after it.
    """
    missed = misses.missed(known_prompts)
    lost, lived = misses.Evicted(misses.wanted(missed)), lifetimes.Collected()
    collectors = (lived, watched.counted, watched.taken, watched.kept)
    columns = dict.fromkeys(
        [
            *lifetimes.COLUMNS,
            *evictions.COLUMNS,
            *misses.EVICTION_COLUMNS,
            *preemptions.EVICTION_COLUMNS,
            *rent.EVICTION_COLUMNS,
        ]
    )
    for batch in session.batches(evictions.TABLE, list(columns), history=True):
        lost.add(batch)
        counted = batch.filter(pl.col("timestamp_sec") >= session.begin_sec)
        for collector in collectors:
            collector.add(counted)
    lifetimes_found = lived.result()
    classified = misses.classify(
        missed,
        known_prompts,
        lost.result(),
        group=known.full_attention_group,
        drops_hit_block=bool(known.scheduler.drops_hit_unit),
    )
    return classified, lifetimes_found


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
