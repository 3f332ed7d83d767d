# SPDX-License-Identifier: Apache-2.0
"""How much did prefix caching save, and why does vLLM's own hit rate say something else?

The true rate counts each request once, by the lookup that led to its admission: the tokens of its
prompt, and those that it did not have to compute. Two kinds of lookups do not count: those after a
preemption, which find the request's own blocks, and those of requests that must not read the
cache, which cannot hit.

vLLM's rate is that of its counters prefix_cache_hits and prefix_cache_queries over the session, by
the rule of the release that ran. (The rate in its log covers the last 1,000 requests only.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from analysis.tables import lookups
from analysis.tables.session import Session

EVERY_LOOKUP = "every lookup"
NOT_RESUMED = "every lookup of requests that were never preempted"
ADMITTED = "admitted lookups of requests that were never preempted"

_RULES = (
    ((0, 8, 0), EVERY_LOOKUP),
    ((0, 11, 1), NOT_RESUMED),
    ((0, 27, 0), ADMITTED),
)
"""Which lookups vLLM counts, from which release on."""


@dataclass(frozen=True)
class Lookups:
    """So many lookups, the tokens that they asked for, and the tokens that they found."""

    lookups: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0

    @property
    def token_rate(self) -> float | None:
        """Tokens found, of tokens asked for, from 0 to 1; None where none were asked for."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else None

    def __add__(self, other: Lookups) -> Lookups:
        return Lookups(
            self.lookups + other.lookups,
            self.query_tokens + other.query_tokens,
            self.hit_tokens + other.hit_tokens,
        )

    def __sub__(self, other: Lookups) -> Lookups:
        return self + Lookups(-other.lookups, -other.query_tokens, -other.hit_tokens)


@dataclass(frozen=True)
class TrueRate:
    """The admitted requests, each counted once.

    ``requests_hit``: those that found any token. ``query_tokens``: their prompts' tokens;
    ``hit_tokens``: those that they found in the cache. ``external_...``: requests that found
    tokens through a KV connector, and these tokens; neither is part of the other figures.
    ``token_rate`` and ``request_rate``: the shares of tokens found and of requests that hit, from
    0 to 1, None without a request.
    """

    requests: int
    requests_hit: int
    query_tokens: int
    hit_tokens: int
    external_requests_hit: int
    external_hit_tokens: int
    token_rate: float | None
    request_rate: float | None


@dataclass(frozen=True)
class VllmRate:
    """The lookups that vLLM counts, and the rate that follows, from 0 to 1.

    ``rule``: which lookups this release counts. ``counted``: those of the true rate, plus
    ``repeated`` (lookups that did not lead to an admission), plus ``resumed`` (lookups after a
    preemption); both as far as the rule counts them. All of these are None where the release is
    not known.
    """

    version: str | None
    rule: str | None
    counted: Lookups | None
    repeated: Lookups | None
    resumed: Lookups | None
    token_rate: float | None


@dataclass(frozen=True)
class PrefixCache:
    """Both rates, and the lookups that the true one leaves out, whether vLLM counts them or not.

    ``repeated``: lookups that did not lead to an admission. ``resumed``: lookups after a
    preemption. ``skipped``: lookups of requests that must not read the cache.
    """

    true: TrueRate
    vllm: VllmRate
    repeated: Lookups
    resumed: Lookups
    skipped: Lookups


def measure(session: Session) -> PrefixCache:
    """Both rates over all engines of the session.

    Raises:
        SessionError: the table cannot be read.

    """
    sums = session.collect(lookups.TABLE, _sums)
    true = _true_rate(lookups.admitted(session))
    once = Lookups(true.requests, true.query_tokens, true.hit_tokens)
    repeated = _lookups(sums.filter(lookups.FRESH)) - once
    resumed = _lookups(sums.filter(pl.col("kind") == "resumed"))
    admitted = _lookups(sums.filter(lookups.FRESH & (pl.col("admitted") == 1)))
    versions = session.metadata.get("versions")
    version = versions.get("vllm") if isinstance(versions, Mapping) else None
    return PrefixCache(
        true=true,
        vllm=_vllm_rate(version, once, repeated, resumed, admitted - once),
        repeated=repeated,
        resumed=resumed,
        skipped=_lookups(sums.filter(pl.col("kind") == "skipped")),
    )


def _sums(table: pl.LazyFrame) -> pl.LazyFrame:
    """By kind and outcome: the lookups, and the tokens that they asked for and found."""
    return table.group_by("kind", "admitted").agg(
        pl.col("lookups").sum(),
        query_tokens=(pl.col("query_tokens") * pl.col("lookups")).sum(),
        hit_tokens=(pl.col("hit_tokens") * pl.col("lookups")).sum(),
    )


def _true_rate(counted: pl.DataFrame) -> TrueRate:
    def found(column: str) -> int:
        return int((counted[column].fill_null(0) > 0).sum())

    requests, requests_hit = counted.height, found("hit_tokens")
    query_tokens, hit_tokens = int(counted["query_tokens"].sum()), int(counted["hit_tokens"].sum())
    return TrueRate(
        requests=requests,
        requests_hit=requests_hit,
        query_tokens=query_tokens,
        hit_tokens=hit_tokens,
        external_requests_hit=found("external_hit_tokens"),
        external_hit_tokens=int(counted["external_hit_tokens"].sum()),
        token_rate=hit_tokens / query_tokens if query_tokens else None,
        request_rate=requests_hit / requests if requests else None,
    )


def _lookups(sums: pl.DataFrame) -> Lookups:
    """The sum of these rows. A lookup that was repeated counts as often as it was made."""
    row = sums.select("lookups", "query_tokens", "hit_tokens").sum().row(0)
    return Lookups(*row)


def _vllm_rate(
    version: Any, once: Lookups, repeated: Lookups, resumed: Lookups, admitted_again: Lookups
) -> VllmRate:
    known = release(version)
    if known is None:
        text = None if version is None else str(version)
        return VllmRate(text, None, None, None, None, None)
    rule = next(rule for since, rule in reversed(_RULES) if known >= since)
    if rule == ADMITTED:
        repeated = admitted_again
    if rule != EVERY_LOOKUP:
        resumed = Lookups()
    counted = once + repeated + resumed
    return VllmRate(str(version), rule, counted, repeated, resumed, counted.token_rate)


def release(version: Any) -> tuple[int, int, int] | None:
    """The release that a version names; None where it names none.

    >>> release("0.11.1rc2"), release("0.32.0+cpu"), release("0.1.dev1+g12ab"), release("dev")
    ((0, 11, 1), (0, 32, 0), None, None)
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(version))
    if match is None:
        return None
    numbers = (int(match[1]), int(match[2]), int(match[3] or 0))
    # A build from a checkout without tags calls itself 0.1.dev.
    return numbers if numbers >= (0, 8, 0) else None
