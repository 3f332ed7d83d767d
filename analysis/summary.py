# SPDX-License-Identifier: Apache-2.0
"""What is known of a session: the answers of all parts of the analyzer, in one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from analysis.gpu.capture_sizes import CaptureSizes
from analysis.gpu.cuda_graphs import CudaGraphs
from analysis.gpu.experts import Experts
from analysis.gpu.gpu_time import GpuTime
from analysis.gpu.graph_ledger import Ledger
from analysis.gpu.memory import Memory
from analysis.headroom.head_room import HeadRoom
from analysis.pool.allocations import Allocations
from analysis.pool.evictions import Evictions
from analysis.pool.fragmentation import Fragmentation
from analysis.pool.holders import Holders
from analysis.pool.kv_groups import Contents
from analysis.pool.lifetimes import Lifetimes
from analysis.pool.usage import Usage
from analysis.prefix.ages import Ages
from analysis.prefix.blame import Blame
from analysis.prefix.conversations import Conversations
from analysis.prefix.families import Families
from analysis.prefix.miss_summary import MissReasons
from analysis.prefix.prefix_cache import PrefixCache
from analysis.prefix.rent import Rent
from analysis.prefix.sharing import Sharing
from analysis.requests.admission import Admission
from analysis.requests.by_whom import ByWhom
from analysis.requests.preemptions import Preemptions
from analysis.requests.requests import Requests
from analysis.requests.scheduling import Scheduling
from analysis.requests.waiting import Waiting
from analysis.tables.facts import Cost, Facts
from analysis.tables.pauses import Period
from analysis.tables.run_totals import RunTotals
from analysis.tables.session import State
from analysis.tables.snapshot import Snapshot
from analysis.tables.window import Window
from analysis.whatif.external import External
from profilemate.format.marks import Mark

Confidence = Literal["high", "medium", "low"]

Known = Literal["replayed", "modelled", "estimated"]


@dataclass(frozen=True)
class About:
    """Which session it is, and how far it goes.

    ``note``: one sentence where the session is not complete, another user's or a snapshot.
    ``duration_sec``: from its beginning to the last event in its tables. ``begin_sec``: where all
    figures but the cost begin: at the end of the warm-up, or of what was removed. ``window``: what
    is left of a run whose oldest segments were removed, else None. ``period``: between which
    pauses of the recording all figures but the cost are, None where it never paused. ``snapshot``:
    of which session it is one, else None. ``siblings``: the names of the other sessions that the
    same program left beside it. ``marks``: the moments that the user marked, warm-up included.
    ``directory``: the session's folder, or its URL where it was fetched from object storage.
    ``missing_bytes``: of tables that the collector wrote and that are not there; None where the
    session is not complete.
    """

    directory: str
    session_id: str
    state: State
    note: str | None
    started_at: str | None
    ended_at: str | None
    duration_sec: float
    begin_sec: float
    window: Window | None
    period: Period | None
    snapshot: Snapshot | None
    siblings: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()
    missing_bytes: int | None = None


@dataclass(frozen=True)
class Effect:
    """What a change does to one figure of this session.

    ``figure``: ``preemptions``, ``recomputed_tokens`` (because of them), ``hit_rate``,
    ``evictions``, ``queue_mean_sec``, ``can_never_run`` (requests), ``empty_share`` (of the slots
    in held blocks), ``padding_share`` (of what graphs compute), ``graph_share`` (of executions),
    or ``without_full_graph`` (executions of decodes).
    ``before`` and ``after``: with the recorded configuration and with the advised one. Both are
    computed in the same way. Shares go from 0 to 1.
    """

    figure: str
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Advice:
    """One thing to change.

    ``about``: what it changes; no two pieces of advice change the same. ``says``: what to do.
    ``flag`` and ``value``: as ``vllm serve`` takes them, None where no flag does it.
    ``evidence``: what in this session speaks for it. ``expect``: what it should bring, and what it
    may cost. ``confidence``: ``high`` where the figures alone decide, ``medium`` where the load may
    react to the change, ``low`` where it is one explanation among others. It is ``high`` only for
    what is ``replayed`` or ``modelled``.

    ``known``: how the effect is known. ``replayed``: the session's requests went through vLLM's
    scheduler again, as recorded and as advised. ``modelled``: a model of the cache, the blocks or
    the graphs computed it for each recorded request or batch. ``estimated``: neither.
    ``effects``: before and after; empty for what is estimated. ``remark``: one sentence on the
    replay where something is to be said: why there is none, or that its time was over.
    """

    about: str
    says: str
    flag: str | None
    value: str | None
    evidence: tuple[str, ...]
    expect: str
    confidence: Confidence
    known: Known = "estimated"
    effects: tuple[Effect, ...] = ()
    remark: str | None = None


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with the session, whether or not a setting mends it.

    ``section``: the section of the summary that has the details. ``says``: one sentence without its
    full stop. ``share``: what it costs, of all tokens of the prompts, of the time of all requests,
    or of the memory, from 0 to 1; None where that is not known. ``tokens``, ``seconds`` (over all
    requests) and ``bytes``: the same in its own unit; None where it has none.
    """

    section: str
    says: str
    share: float | None
    tokens: int | None = None
    seconds: float | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Summary:
    """What ``analysis.summarize`` returns. Each part documents its figures and their units.

    ``run``: figures of the whole run, warm-up and removed segments included; None for a session
    that lacks them.
    """

    session: About
    run: RunTotals | None
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
    external: External | None
    conversations: Conversations
    misses: MissReasons
    families: Families
    requests: Requests
    by_whom: ByWhom
    preemptions: Preemptions
    admission: Admission
    waiting: Waiting
    scheduling: Scheduling
    holders: Holders | None
    fragmentation: Fragmentation | None
    head_room: HeadRoom
    cuda_graphs: CudaGraphs
    graph_ledger: Ledger | None
    capture_sizes: CaptureSizes | None
    memory: Memory
    gpu_time: GpuTime
    experts: Experts
    cost: Cost
    findings: tuple[Finding, ...] = ()
    advice: tuple[Advice, ...] = ()
