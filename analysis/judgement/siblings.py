# SPDX-License-Identifier: Apache-2.0
"""The sessions of one program, side by side: each of its engines has a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.judgement.summarizing import summarize
from analysis.summary import Summary
from analysis.tables.session import Session, State


@dataclass(frozen=True)
class Sibling:
    """One of the sessions, in short.

    ``engines``: how many recorded. ``pool_blocks``: of each, the null block included.
    ``requests``: that ended. ``token_rate``: the true hit rate. ``evicted_blocks``: cached blocks
    that lost their content. ``peak_pct``: the most of the blocks in use at once.
    """

    session_id: str
    state: State
    model: str | None
    engines: int
    pool_blocks: int | None
    requests: int
    token_rate: float | None
    evicted_blocks: int
    peak_pct: float | None


@dataclass(frozen=True)
class Siblings:
    """All of them in short, and the summary of each in the same order."""

    sessions: tuple[Sibling, ...]
    summaries: tuple[Summary, ...]


def together(sessions: Sequence[Session]) -> Siblings:
    """The summaries of these sessions.

    Raises:
        SessionError: a table cannot be read, or a line of it is malformed.

    """
    summaries = tuple(map(summarize, sessions))
    return Siblings(tuple(map(_in_short, summaries)), summaries)


def _in_short(summary: Summary) -> Sibling:
    combined = summary.usage.combined
    return Sibling(
        session_id=summary.session.session_id,
        state=summary.session.state,
        model=summary.facts.model,
        engines=len(summary.facts.engines),
        pool_blocks=summary.facts.pool_blocks,
        requests=summary.requests.ended,
        token_rate=summary.prefix_cache.true.token_rate,
        evicted_blocks=summary.evictions.total.blocks,
        peak_pct=None if combined is None else combined.peak_pct,
    )
