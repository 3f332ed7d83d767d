# SPDX-License-Identifier: Apache-2.0
"""All answers of one session, with each large table read once.

``measure`` is the list of passes, in order. A pass is a function: its arguments are what it needs,
and its result is what it gives. Some frames have millions of rows, so each of them is freed as soon
as possible: at the end of the only pass that needs it, or by a ``del`` or a new value in
``measure`` after the last pass that does.

========= ======================== =====================================================
pass      reads                    is the last one to need
========= ======================== =====================================================
requests  requests.jsonl
steps     scheduler_steps.csv      the pools' states
contents                           a row for each block of each request
evictions kv_cache_evictions.csv   the lifetime of each evicted block
blocks    kv_cache_allocations.csv
misses                             the evictions of missed contents
regrets                            the evictions that led to a miss, and these misses
graphs    cuda_graph_*.csv         a row for each capture and for each kind of execution
========= ======================== =====================================================

Other modules read the small tables that they need by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import polars as pl

from analysis.gpu import (
    capture_sizes,
    captures,
    cuda_graphs,
    executions,
    experts,
    gpu_time,
    graph_ledger,
    memory,
)
from analysis.gpu.capture_sizes import CaptureSizes, DecodeStepTally
from analysis.gpu.cuda_graphs import CudaGraphs
from analysis.gpu.graph_ledger import Ledger
from analysis.gpu.memory import Memory
from analysis.headroom import head_room
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
from analysis.pool.allocations import AllocationTally
from analysis.pool.evictions import Evictions, EvictionTally
from analysis.pool.holders import HolderTally
from analysis.pool.lifetimes import Lifetimes, LifetimeTally
from analysis.pool.usage import Usage
from analysis.prefix import (
    ages,
    apart,
    blame,
    conversations,
    families,
    miss_summary,
    misses,
    prefix_cache,
    prompts,
    rent,
    request_ages,
    reuse,
    sharing,
    stretches,
)
from analysis.prefix.apart import ApartTally
from analysis.prefix.blame import Blame
from analysis.prefix.families import FamilyTally
from analysis.prefix.miss_summary import HandedOutTally
from analysis.prefix.misses import LossTally
from analysis.prefix.prompts import Prompts, PromptTally
from analysis.prefix.rent import RentTally
from analysis.prefix.request_ages import Clocks, EvictionAgeTally
from analysis.requests import (
    admission,
    askers,
    by_whom,
    preemption_bill,
    preemption_steps,
    preemptions,
    requests,
    scheduling,
    stints,
    waiting,
)
from analysis.requests.askers import AskerTally
from analysis.requests.preemption_steps import StepTally
from analysis.requests.preemptions import TakerTally
from analysis.requests.scheduling import Scheduling, SchedulingTally
from analysis.requests.waiting import Waiting, WaitingTally
from analysis.summary import About, Summary
from analysis.tables import facts, marks, run_totals
from analysis.tables.facts import Facts
from analysis.tables.find import siblings
from analysis.tables.session import Session
from analysis.whatif import external


def measure(session: Session) -> Summary:
    """Everything that the session's tables show, without a judgement on it: no advice.

    Raises:
        SessionError: a table cannot be read, or a line of it is malformed.

    """
    # Work that needs no table runs beside reading the next one: Polars releases the GIL.
    with ThreadPoolExecutor(1) as beside:
        known = facts.read(session)
        used = usage.measure(session)
        asked = _requests(session)
        prompt_families = beside.submit(asked.families.result, session, known)
        stepped = _steps(session, known, used)
        # These read small tables while the main thread compares contents.
        hits = beside.submit(prefix_cache.measure, session)
        admitted = beside.submit(admission.measure, session, known, used, stepped.preempting)
        fragmented = beside.submit(fragmentation.measure, session, known, used)
        ran = stints.with_lookups(session, asked.prompts)
        preempted = preemptions.victims(ran, asked.prompts, session.begin_sec)
        elsewhere = apart.came_before(asked.prompts, asked.apart.result())
        asking, bare_is_known = asked.askers.result(session.labels), asked.apart.is_known
        contents, missed = _contents(asked.prompts)
        del asked  # It has a row for each block of each request.
        reused = _reuse(contents)
        admitted_at = request_ages.clocks(contents.prompts)
        evicted = _evictions(session, misses.content_ids(missed), preempted, admitted_at)
        moved = beside.submit(_blocks, session, ran, stepped.holders)
        missed = _misses(known, contents, missed, evicted.lost)
        elsewhere = apart.new_to_their_own(elsewhere, missed)
        regretted = evictions.missed_since_evicted(missed, contents.prompts.asked)
        missed = missed.select(miss_summary.BLOCK_COLUMNS)
        regrets = _regrets(session, known, used, contents, reused, regretted, evicted.evictions)
        del regretted  # It has a row for each miss that an eviction caused.
        shared = sharing.measure(session, contents.prompts, reused.uses, used)
        distinct = sharing.distinct(contents.prompts, reused.uses)
        useful = miss_summary.useful_blocks(known, used, contents.prompts, distinct)
        blocks = moved.result()
        priced = preemption_bill.measure(session, known, preempted, stepped.preempting)
        explained = beside.submit(
            miss_summary.measure, contents.prompts, missed, blocks.handed_out.result(), useful
        )
        graphs = _graphs(session, known, stepped.decodes)
        return Summary(
            session=_about(session),
            run=run_totals.read(session.directory),
            warnings=facts.warnings(session),
            facts=known,
            usage=used,
            allocations=blocks.allocations.result(),
            lifetimes=evicted.lifetimes,
            evictions=regrets.evictions,
            groups=kv_groups.measure(session, known),
            ages=ages.measure(reused.uses, evicted.lifetimes, admitted_at, evicted.ages),
            blame=regrets.blame,
            sharing=shared,
            conversations=conversations.measure(contents.prompts, reused.uses),
            head_room=head_room.measure(session, known, used, reused.uses),
            rent=rent.measure(
                session,
                known,
                contents.prompts,
                reused.uses,
                reused.asked_again,
                blocks.rent,
                evicted.evictions.kept_by_owner(),
            ),
            prefix_cache=hits.result(),
            external=external.measure(session, known, _waited(stepped.waiting)),
            requests=requests.measure(session),
            preemptions=preemptions.measure(
                session, known, priced, evicted.takers, stepped.preempting
            ),
            by_whom=by_whom.measure(
                asking,
                contents.prompts.asked,
                missed,
                elsewhere if bare_is_known else None,
                blocks.rent.result(),
                evicted.evictions.kept_by_owner(),
                evicted.evictions.by_evictor(),
                priced,
                stepped.preempting.preempted,
            ),
            admission=admitted.result(),
            waiting=stepped.waiting,
            scheduling=stepped.scheduling,
            holders=blocks.holders.result(),
            fragmentation=fragmented.result(),
            cuda_graphs=graphs.use,
            graph_ledger=graphs.ledger,
            capture_sizes=graphs.sizes,
            memory=graphs.memory,
            gpu_time=gpu_time.measure(session),
            experts=experts.measure(session),
            cost=facts.cost(session),
            families=prompt_families.result(),
            misses=explained.result(),
        )


def _waited(waiting: Waiting) -> float:
    """For how long requests waited for a KV connector, as requests times seconds."""
    reason = waiting.by_reason.get("connector")
    return reason.request_sec if reason else 0.0


class _Tally(Protocol):
    def add(self, batch: pl.DataFrame) -> None: ...


def _go_through(
    session: Session,
    table: str,
    columns: Iterable[str],
    *,
    all_rows: Iterable[_Tally],
    after_warm_up: Iterable[_Tally],
) -> None:
    """Show all rows of a table to some tallies, and those after the warm-up to others."""
    for batch in session.batches(table, list(dict.fromkeys(columns)), history=True):
        for tally in all_rows:
            tally.add(batch)
        counted = batch.filter(session.in_window(table))
        for tally in after_warm_up:
            tally.add(counted)


@dataclass(frozen=True)
class _Requests:
    prompts: Prompts
    """With a row for each block of each request."""
    families: FamilyTally
    apart: ApartTally
    askers: AskerTally


def _requests(session: Session) -> _Requests:
    """Read requests.jsonl. Prompts of the warm-up explain what later requests found."""
    prompted, begun = PromptTally(), FamilyTally()
    set_apart, asking = ApartTally(), AskerTally(session.begin_sec)
    _go_through(
        session,
        prompts.TABLE,
        (*prompts.COLUMNS, *families.COLUMNS, *apart.COLUMNS, *askers.COLUMNS),
        all_rows=(prompted, set_apart, asking),
        after_warm_up=(begun,),
    )
    return _Requests(prompted.result(session), begun, set_apart, asking)


@dataclass(frozen=True)
class _Steps:
    waiting: Waiting
    scheduling: Scheduling
    holders: HolderTally
    """Without any allocation so far."""
    decodes: DecodeStepTally
    preempting: StepTally


def _steps(session: Session, known: Facts, used: Usage) -> _Steps:
    """Read scheduler_steps.csv, with the pools' states at hand.

    Steps of the warm-up show which requests waited later.
    """
    pools = pressure.states(session)
    waited, scheduled = WaitingTally(session, known, used, pools), SchedulingTally(session, pools)
    decodes, preempting = DecodeStepTally(), StepTally(session.begin_sec)
    _go_through(
        session,
        waiting.TABLE,
        (
            *waiting.COLUMNS,
            *scheduling.COLUMNS,
            *capture_sizes.COLUMNS,
            *preemption_steps.COLUMNS,
        ),
        all_rows=(waited, preempting),
        after_warm_up=(scheduled, decodes),
    )
    return _Steps(
        waited.result(),
        scheduled.result(),
        HolderTally(session, known, used, pools),
        decodes,
        preempting,
    )


@dataclass(frozen=True)
class _Contents:
    prompts: Prompts
    """Without a row for each block."""
    stretches: pl.DataFrame


def _contents(asked: Prompts) -> tuple[_Contents, pl.DataFrame]:
    """Compare the contents of all requests. It gives the missed blocks as well."""
    common = stretches.in_common(asked)
    return _Contents(asked.without_contents(), common), misses.missed_blocks(asked, common)


@dataclass(frozen=True)
class _Reuse:
    uses: pl.DataFrame
    asked_again: pl.DataFrame


def _reuse(contents: _Contents) -> _Reuse:
    uses = reuse.uses(contents.prompts, contents.stretches)
    return _Reuse(uses, reuse.asked_again(uses))


@dataclass(frozen=True)
class _Evictions:
    lost: LossTally
    lifetimes: Lifetimes
    evictions: EvictionTally
    takers: TakerTally
    ages: EvictionAgeTally


def _evictions(
    session: Session, wanted: pl.Series, preempted: pl.DataFrame, admitted: Clocks
) -> _Evictions:
    """Read kv_cache_evictions.csv. Evictions of the warm-up explain later misses."""
    lost, lived = LossTally(wanted), LifetimeTally()
    evicted, taken = EvictionTally(session.begin_sec), TakerTally(preempted)
    aged = EvictionAgeTally(admitted)
    _go_through(
        session,
        evictions.TABLE,
        (
            *lifetimes.COLUMNS,
            *evictions.COLUMNS,
            *misses.EVICTION_COLUMNS,
            *preemptions.EVICTION_COLUMNS,
            *request_ages.COLUMNS,
        ),
        all_rows=(lost,),
        after_warm_up=(lived, evicted, taken, aged),
    )
    return _Evictions(lost, lived.result(), evicted, taken, aged)


@dataclass(frozen=True)
class _Blocks:
    allocations: AllocationTally
    rent: RentTally
    handed_out: HandedOutTally
    holders: HolderTally


def _blocks(session: Session, ran: pl.DataFrame, held: HolderTally) -> _Blocks:
    """Read kv_cache_allocations.csv.

    Requests may hold blocks long after the warm-up in which they got them.
    """
    moved, handed_out = AllocationTally(), HandedOutTally()
    paid = RentTally(ran, session.begin_sec, session.end_sec)
    _go_through(
        session,
        allocations.TABLE,
        (*allocations.COLUMNS, *rent.COLUMNS, *miss_summary.COLUMNS, *holders.COLUMNS),
        all_rows=(paid, handed_out, held),
        after_warm_up=(moved,),
    )
    return _Blocks(moved, paid, handed_out, held)


def _misses(
    known: Facts, contents: _Contents, missed: pl.DataFrame, lost: LossTally
) -> pl.DataFrame:
    """The missed blocks with their reasons."""
    return misses.classify(
        missed,
        contents.prompts,
        contents.stretches,
        lost.result(),
        group=known.full_attention_group,
        drops_hit_block=bool(known.scheduler.drops_hit_unit),
    )


@dataclass(frozen=True)
class _Regrets:
    evictions: Evictions
    blame: Blame


def _regrets(
    session: Session,
    known: Facts,
    used: Usage,
    contents: _Contents,
    reused: _Reuse,
    regretted: pl.DataFrame,
    evicted: EvictionTally,
) -> _Regrets:
    """Which evictions were a loss, and which requests caused them."""
    return _Regrets(
        evicted.result(session, known, used, regretted),
        blame.measure(
            evictions.for_room(regretted),
            contents.prompts,
            reused.uses,
            reused.asked_again,
            evicted.by_evictor(),
        ),
    )


@dataclass(frozen=True)
class _Graphs:
    use: CudaGraphs
    ledger: Ledger | None
    sizes: CaptureSizes | None
    memory: Memory


def _graphs(session: Session, known: Facts, decodes: DecodeStepTally) -> _Graphs:
    """Read the tables of CUDA graphs, and that of the GPU memory, which they take some of."""
    captured, ran = captures.read(session), executions.read(session)
    use = cuda_graphs.measure(session, ran, captures.sizes(captured))
    held = memory.measure(session, known)
    return _Graphs(
        use,
        graph_ledger.measure(session, known, held, captured, ran),
        capture_sizes.measure(known, use.setup.capture_sizes, captured, ran, decodes),
        held,
    )


def _about(session: Session) -> About:
    def text(name: str) -> str | None:
        value = session.metadata.get(name)
        return None if value is None else str(value)

    return About(
        directory=session.url or str(session.directory.absolute()),
        session_id=text("session_id") or session.directory.absolute().name,
        state=session.state,
        note=session.note,
        started_at=text("started_at"),
        ended_at=text("ended_at"),
        duration_sec=session.end_sec,
        begin_sec=session.begin_sec,
        window=session.window,
        period=session.period,
        snapshot=session.snapshot,
        siblings=tuple(
            other.name for other in siblings(session.directory) if other != session.directory
        ),
        marks=marks.read(session.directory),
        missing_bytes=session.missing_bytes,
    )
