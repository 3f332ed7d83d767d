# SPDX-License-Identifier: Apache-2.0
"""How many blocks do so many requests hold together, and how often does one of them lose its own?

Each of them is at a random step of a random life: of all steps of all lives, one is as likely as
another, so long lives come up more often, as they run longer. They are independent of each other,
and come in a random order, so one draw of many requests answers for every smaller number, too. A
stretch that several of them hold counts once. This is a Monte Carlo estimate: ``draws`` of them,
always the same ones for the same lives.

A request is preempted where one is given a block that the pool does not have. The scheduler takes
the newest requests first, as many as hold what is missing. Their blocks are what the next requests
grow into, so of the moments at which a request grows and there is no room, one in as many as a
victim's blocks is a preemption.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from analysis.headroom.lives import Ints, Lives

Floats = NDArray[np.float64]

MOST_REQUESTS = 4096
"""Running requests at most that the estimate is made for."""

_MOST_DRAWS = 2000
_FEWEST_DRAWS = 200
_ROWS = 1_500_000
"""Requests and stretches in all draws at most: a second's work."""
_AT_ONCE = 400_000
"""Requests and stretches that are looked at together."""
_VICTIMS = 50_000
"""Requests among which victims are looked for, at most."""
_SEED = 20_26
_HALF = 0.5


@dataclass(frozen=True)
class Together:
    """A row for each draw, and a column for each request in it.

    ``added``: blocks that the request holds beyond those of the requests before it. ``age``: steps
    that it has lived. ``grown``: blocks that the first so many hold where the very first has just
    been given a block for its answer; None where no life grows by a block. ``growth``: blocks that
    a life grows by on average.
    """

    added: Ints
    age: Ints
    grown: Ints | None
    growth: float

    @property
    def draws(self) -> int:
        return len(self.added)

    @property
    def most(self) -> int:
        """Requests at most."""
        return int(self.added.shape[1])

    @property
    def error(self) -> float:
        """The standard error of a chance, where it is largest."""
        return float(_HALF / np.sqrt(self.draws))

    @cached_property
    def blocks(self) -> Ints:
        """Blocks that the first 1, 2, ... requests of each draw hold."""
        total: Ints = np.cumsum(self.added, axis=1, dtype=np.int64)
        return total

    def over(self, pool: int) -> Floats:
        """By requests at once, from 0 on: the chance that they hold more blocks than the pool."""
        return np.concatenate([[0.0], (self.blocks > pool).mean(axis=0)])

    def mean(self, requests: int) -> float:
        """Blocks that so many requests hold on average."""
        return float(self.blocks[:, requests - 1].mean())

    def quantile(self, requests: int, share: float) -> int:
        """Blocks that so many requests exceed with a chance of at most 1 - ``share``."""
        held = self.blocks[:, requests - 1]
        return int(np.quantile(held, share, method="inverted_cdf"))

    def fit(self, pool: int, chance: float) -> int | None:
        """How many requests fit but for at most this chance; None for ``most`` or more."""
        over = np.flatnonzero(self.over(pool) > chance)
        return int(over[0]) - 1 if len(over) else None

    def at_once(self, pool: int) -> int:
        """How many requests run at once at most: as many as fit half of the time."""
        fit = self.fit(pool, _HALF)
        return self.most if fit is None else max(1, fit)

    def preempted(self, requests: int, pool: int) -> float:
        """Preemptions of a request, from its admission to its end, while so many would run."""
        if self.grown is None or requests < 1:
            return 0.0
        missing = float((self.grown[:, min(requests, self.most) - 1] > pool).mean())
        if not missing:
            return 0.0
        return self.growth * missing / self._freed(min(requests, self.at_once(pool) + 1), pool)

    def _freed(self, requests: int, pool: int) -> float:
        """Blocks that a preemption frees on average, where so many requests do not fit."""
        requests = min(requests, self.most)
        rows = np.flatnonzero(self.blocks[:, requests - 1] > pool)[: 1 + _VICTIMS // requests]
        if not len(rows):
            return max(1.0, float(self.added[:, 0].mean()))
        newest = np.argsort(self.age[rows, :requests], axis=1, kind="stable")
        freed = np.cumsum(np.take_along_axis(self.added[rows, :requests], newest, axis=1), axis=1)
        missing = self.blocks[rows, requests - 1] - pool
        victims = np.minimum((freed < missing[:, None]).sum(axis=1) + 1, requests)
        total = freed[np.arange(len(rows)), victims - 1].sum()
        return max(1.0, float(total / victims.sum()))


def draw(lives: Lives, most: int) -> Together:
    """Draw requests that run together.

    Args:
        lives: of the session; at least one.
        most: how many run at most, up to ``MOST_REQUESTS``.

    """
    each = 1 + len(lives.stretches.key) / len(lives)
    draws = int(min(_MOST_DRAWS, max(_FEWEST_DRAWS, _ROWS / (most * each))))
    random = np.random.default_rng(_SEED)
    grows = bool((lives.last_blocks > lives.first_blocks).any())
    part = max(1, int(_AT_ONCE / (most * each)))
    added, age, grown = [], [], []
    for begin in range(0, draws, part):
        shape = (min(part, draws - begin), most)
        life, step = (each.reshape(shape) for each in _moments(lives, random, shape[0] * most))
        held = lives.blocks_at(life, step)
        added.append((held - _again(lives, life)).astype(np.int32))
        age.append(step.astype(np.int32))
        if grows:
            life[:, 0], held[:, 0] = _growing(lives, random, shape[0])
            grown.append(np.cumsum(held - _again(lives, life), axis=1))
    return Together(
        np.concatenate(added),
        np.concatenate(age),
        np.concatenate(grown) if grown else None,
        float((lives.last_blocks - lives.first_blocks).mean()),
    )


def _moments(lives: Lives, random: np.random.Generator, count: int) -> tuple[Ints, Ints]:
    """Random steps: the life of each, and the number of the step in it."""
    ends = np.cumsum(lives.steps)
    step = random.integers(0, ends[-1], count)
    life = np.searchsorted(ends, step, side="right")
    return life, step - (ends - lives.steps)[life]


def _growing(lives: Lives, random: np.random.Generator, count: int) -> tuple[Ints, Ints]:
    """Random moments at which a life gets a block for its answer, and its blocks with that one."""
    first, grows = lives.first_blocks, lives.last_blocks - lives.first_blocks
    ends = np.cumsum(grows)
    at = random.integers(0, ends[-1], count)
    life = np.searchsorted(ends, at, side="right")
    return life, first[life] + 1 + at - (ends - grows)[life]


def _again(lives: Lives, life: Ints) -> Ints:
    """Of each request's blocks, those that one before it in the same draw holds."""
    shared, flat = lives.stretches, life.ravel()
    begins, counts = shared.offsets[:-1][flat], np.diff(shared.offsets)[flat]
    request = np.repeat(np.arange(len(flat)), counts)
    at = np.arange(len(request)) + (begins - np.cumsum(counts) + counts)[request]
    codes = request // life.shape[1] * max(1, shared.keys) + shared.key[at]
    again = np.ones(len(codes), np.bool_)
    again[np.unique(codes, return_index=True)[1]] = False
    found = np.bincount(request[again], weights=shared.blocks[at][again], minlength=len(flat))
    return found.astype(np.int64).reshape(life.shape)
