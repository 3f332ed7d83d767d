# SPDX-License-Identifier: Apache-2.0
"""How many requests at once does a pool have room for, and what happens where they are more?

``together`` estimates what requests hold that run at once, out of the session's own. The recorded
load is tried under other settings by how many requests were in the engine. It stays what it was:
where requests would wait longer, more of them would be there, so in a crowd the figures are too
low. ``whatif`` replays that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from analysis.headroom import demand, lives, longest, together, unused
from analysis.headroom.demand import Day, Demand
from analysis.headroom.lives import Lives
from analysis.headroom.longest import Longest
from analysis.headroom.together import MOST_REQUESTS, Together
from analysis.headroom.unused import Unused
from analysis.pool.usable import block_size_of, usable_blocks
from analysis.pool.usage import Usage
from analysis.tables.facts import Facts
from analysis.tables.session import Session

CHANCE = 0.01
"""Requests fit if they hold more than the pool for no more than this share of the time."""

_FACTORS = (0.5, 1.0, 2.0)
"""Pools that the load is tried with, of the session's own."""
_ROOMY = 2.5
"""Requests are drawn until they hold so many times the pool."""
_CURVE = 24
"""Points of a curve at most."""


@dataclass(frozen=True)
class Crowd:
    """While ``requests`` run: the blocks that they hold, on average and in all but 1 % of the time;
    ``over_share``, the share of the time in which they need more than the pool has; and
    ``preemptions`` of a request from its admission to its end."""

    requests: int
    mean_blocks: float
    p99_blocks: int
    over_share: float
    preemptions: float


@dataclass(frozen=True)
class Setting:
    """The recorded load on other settings.

    ``pool_blocks``: usable ones. ``max_num_seqs``: None for no limit. ``fit``: requests that fit
    but for 1 % of the time, None for all that were drawn or more. ``waiting_share``: of the
    requests, those that would have had to wait for a place or for blocks. ``preemptions``: how many
    there would have been.
    """

    pool_blocks: int
    max_num_seqs: int | None
    fit: int | None
    waiting_share: float
    preemptions: float


@dataclass(frozen=True)
class Room:
    """What the session's ``requests`` take.

    ``block_size``: in tokens. ``pool_blocks``: usable ones of an engine, of the smallest.
    ``draws``: of the estimate. ``error``: the standard error of a share where that is largest.
    ``most``: requests that it was made for. ``mean_blocks`` and ``p99_blocks``: that one request
    holds at a moment. ``shared_share``: of the blocks of as many requests as fit, those that
    another one of them holds, too. ``growth_blocks``: that an answer adds. ``fit``: requests that
    fit but for 1 % of the time; ``half``: but for half of it; None for ``most`` or more.
    ``crowds``: numbers of requests that mean something here. ``curve``: numbers from 1 to where
    nothing fits. ``settings``: by pool and ``max_num_seqs``.
    """

    requests: int
    block_size: int
    pool_blocks: int
    draws: int
    error: float
    most: int
    mean_blocks: float
    p99_blocks: int
    shared_share: float
    growth_blocks: float
    fit: int | None
    half: int | None
    crowds: tuple[Crowd, ...]
    curve: tuple[Crowd, ...]
    settings: tuple[Setting, ...]


@dataclass(frozen=True)
class HeadRoom:
    """``room``: None for several KV cache groups, and where no request ended or the size of the
    pool is not known. ``days``: how many requests were there at once. ``longest``: None without a
    request. ``unused``: by engine and pool."""

    room: Room | None
    days: tuple[Day, ...]
    longest: Longest | None
    unused: tuple[Unused, ...]


def measure(session: Session, facts: Facts, usage: Usage, uses: pl.DataFrame) -> HeadRoom:
    """The head room of the session's engines.

    Args:
        session: the session.
        facts: of the session.
        usage: of its pools.
        uses: what ``analysis.prefix.reuse.uses`` returns for it.

    Raises:
        SessionError: a table cannot be read.

    """
    load = demand.measure(session)
    return HeadRoom(
        room=_room(session, facts, usage, uses, load),
        days=load.days,
        longest=longest.measure(session),
        unused=unused.measure(session, facts),
    )


def _room(
    session: Session, facts: Facts, usage: Usage, uses: pl.DataFrame, load: Demand
) -> Room | None:
    size, pools = block_size_of(facts, usage), usable_blocks(facts, usage)
    pool = min(pools.values(), default=0)
    if size is None or pool < 1:
        return None
    known = lives.read(session, uses, size, facts.scheduler)
    if not len(known):
        return None
    places = facts.scheduler.max_num_active_seqs
    drawn = together.draw(known, requests_at_most(known, pool))
    fit, half = drawn.fit(pool, CHANCE), drawn.fit(pool, 0.5)
    crowd = max(1, min(drawn.most, fit or 1))
    apart = crowd * drawn.mean(1)
    return Room(
        requests=len(known),
        block_size=size,
        pool_blocks=pool,
        draws=drawn.draws,
        error=drawn.error,
        most=drawn.most,
        mean_blocks=drawn.mean(1),
        p99_blocks=drawn.quantile(1, 0.99),
        shared_share=_shared(drawn, crowd, apart),
        growth_blocks=drawn.growth,
        fit=fit,
        half=half,
        crowds=tuple(
            _crowd(drawn, requests, pool) for requests in _crowds(drawn, fit, half, places, load)
        ),
        curve=tuple(_crowd(drawn, requests, pool) for requests in _curve(drawn, half)),
        settings=tuple(
            setting(drawn, load, max(1, round(pool * factor)), limit)
            for factor in _FACTORS
            for limit in _limits(places, fit)
        ),
    )


def requests_at_most(known: Lives, pool: int) -> int:
    """How many requests to draw: those that hold the pool and more, if they share all that they
    can."""
    held = (known.first_blocks + known.last_blocks) / 2 - known.stretches.of_each
    alone = max(1.0, float(np.average(held, weights=known.steps)))
    return max(1, min(MOST_REQUESTS, int(np.ceil(_ROOMY * pool / alone))))


def _shared(drawn: Together, requests: int, apart: float) -> float:
    # The first one of a draw shares with none before it.
    return max(0.0, 1 - drawn.mean(requests) / apart) if requests > 1 else 0.0


def _crowds(
    drawn: Together, fit: int | None, half: int | None, places: int | None, load: Demand
) -> list[int]:
    """The numbers of requests that are worth a row."""
    peak = max((day.peak_requests for day in load.days), default=None)
    wanted = {fit, half, places, peak, None if fit is None else fit // 2}
    return sorted(number for number in wanted if number and number <= drawn.most)


def _curve(drawn: Together, half: int | None) -> list[int]:
    """Evenly spaced numbers of requests, up to one and a half times those that fit."""
    end = max(1, min(drawn.most, drawn.most if half is None else half + half // 2))
    return sorted({round(float(number)) for number in np.linspace(1, end, _CURVE)})


def _limits(places: int | None, fit: int | None) -> list[int | None]:
    """The recorded limit, and the requests that fit into the recorded pool."""
    return [places, *({fit} - {places, None, 0})]


def _crowd(drawn: Together, requests: int, pool: int) -> Crowd:
    return Crowd(
        requests=requests,
        mean_blocks=drawn.mean(requests),
        p99_blocks=drawn.quantile(requests, 0.99),
        over_share=float(drawn.over(pool)[requests]),
        preemptions=drawn.preempted(requests, pool),
    )


def setting(drawn: Together, load: Demand, pool: int, places: int | None) -> Setting:
    """The recorded load on a pool of so many usable blocks, of which so many requests run."""
    over = drawn.over(pool)
    found = load.at_arrival
    waits = over[np.minimum(found, drawn.most)]
    if places is not None:
        waits = np.where(found > places, 1.0, waits)
    limit = drawn.most if places is None else min(places, drawn.most)
    running = np.minimum(load.at_once, limit)
    # A request grows only while it runs.
    weights = load.seconds * np.minimum(running, drawn.at_once(pool))
    numbers, place = np.unique(running, return_inverse=True)
    each = np.array([drawn.preempted(int(number), pool) for number in numbers])
    mean = float((weights * each[place]).sum() / weights.sum()) if weights.sum() else 0.0
    return Setting(
        pool_blocks=pool,
        max_num_seqs=places,
        fit=drawn.fit(pool, CHANCE),
        waiting_share=float(waits.mean()) if len(waits) else 0.0,
        preemptions=mean * len(found),
    )
