# SPDX-License-Identifier: Apache-2.0
"""One session's answers, all of them, with each table read once."""

from __future__ import annotations

from dataclasses import dataclass

from analysis import (
    admission,
    allocations,
    evictions,
    facts,
    lifetimes,
    preemptions,
    prefix_cache,
    requests,
    usage,
)
from analysis.admission import Admission
from analysis.allocations import Allocations
from analysis.evictions import Evictions
from analysis.facts import Cost, Facts
from analysis.lifetimes import Lifetimes
from analysis.preemptions import Preemptions
from analysis.prefix_cache import PrefixCache
from analysis.requests import Requests
from analysis.session import Session, State
from analysis.usage import Usage


@dataclass(frozen=True)
class About:
    """Which session, and how far it goes. ``duration_sec``: from its beginning to the last event
    that is in its tables; ``note``: what is special about one that is not complete."""

    directory: str
    session_id: str
    state: State
    note: str | None
    started_at: str | None
    ended_at: str | None
    duration_sec: float


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
    prefix_cache: PrefixCache
    requests: Requests
    preemptions: Preemptions
    admission: Admission
    cost: Cost


def summarize(session: Session) -> Summary:
    """Everything that the session's tables tell about its KV cache.

    Raises:
        SessionError: a table cannot be read, or a line of it is malformed.

    """
    known = facts.read(session)
    used = usage.measure(session)
    lived, evicted = _evictions(session)
    return Summary(
        session=_about(session),
        warnings=facts.warnings(session),
        facts=known,
        usage=used,
        allocations=allocations.measure(session),
        lifetimes=lived,
        evictions=evicted,
        prefix_cache=prefix_cache.measure(session),
        requests=requests.measure(session),
        preemptions=preemptions.measure(session),
        admission=admission.measure(session, known, used),
        cost=facts.cost(session),
    )


def _evictions(session: Session) -> tuple[Lifetimes, Evictions]:
    """Both answers that kv_cache_evictions.csv gives, in one pass: it is the largest table."""
    lived, evicted = lifetimes.Collected(), evictions.Counted()
    for batch in session.batches(evictions.TABLE, [*lifetimes.COLUMNS, *evictions.COLUMNS]):
        lived.add(batch)
        evicted.add(batch)
    return lived.result(), evicted.result()


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
    )
