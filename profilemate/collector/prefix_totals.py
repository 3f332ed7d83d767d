# SPDX-License-Identifier: Apache-2.0
"""The lookups of one engine's whole run, for ``totals.json``.

The lookup that led to a request's admission counts for the hit rate. There may be two of them where
a KV transfer failed and left the request's blocks empty: then the last one counts, as in
``analysis.tables.lookups``. So what counted is kept until the request has ended.
"""

from __future__ import annotations

from typing import Any

from profilemate.collector.lookups import FIRST, RESUMED, RETRY, SKIPPED, OpenRow
from profilemate.format import totals

FRESH = "fresh"

_KINDS = {FIRST: FRESH, RETRY: FRESH, RESUMED: "resumed", SKIPPED: "skipped"}


class PrefixTotals:
    """Sums over the rows of the prefix cache's lookups.

    Whoever writes a row appends it to ``rows``: the request's number, the row, tokens found
    outside, and whether it was admitted. There it waits for ``fold``.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, OpenRow, int, int]] = []
        self._sums = {name: [0, 0, 0] for name in _KINDS.values()}
        """Lookups, tokens asked for, and tokens found."""
        self._once = [0] * 6
        """Requests, those that found something, tokens asked for and found; requests that found
        something outside, and these tokens."""
        self._counted: dict[int, tuple[int, int, int]] = {}

    def fold(self) -> None:
        """Add up the rows that wait."""
        if not self.rows:
            return
        counted = self._counted
        # Nearly all rows are fresh: their sums are kept in variables, which costs a third.
        all_lookups = all_queries = all_hits = 0
        for request, row, external, admitted in self.rows:
            lookups, query, hit = row.lookups, row.query_tokens, row.hit_tokens
            name = _KINDS[row.kind]
            if name != FRESH:
                self._add(name, lookups, query * lookups, hit * lookups)
                continue
            all_lookups += lookups
            all_queries += query * lookups
            all_hits += hit * lookups
            if admitted:
                if request in counted:
                    self._count(*counted[request], -1)
                counted[request] = (query, hit, external)
                self._count(query, hit, external, 1)
        self._add(FRESH, all_lookups, all_queries, all_hits)
        self.rows.clear()

    def _add(self, name: str, lookups: int, query_tokens: int, hit_tokens: int) -> None:
        sums = self._sums[name]
        sums[0] += lookups
        sums[1] += query_tokens
        sums[2] += hit_tokens

    def _count(self, query: int, hit: int, external: int, sign: int) -> None:
        once = self._once
        once[0] += sign
        once[2] += sign * query
        if hit:
            once[1] += sign
            once[3] += sign * hit
        if external:
            once[4] += sign
            once[5] += sign * external

    def forget(self, request: int) -> None:
        """The request has ended, and no row of it waits."""
        self._counted.pop(request, None)

    def forget_all(self) -> None:
        """No request is known any more."""
        self.fold()
        self._counted.clear()

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens that were asked for and found, each admitted request counted once."""
        self.fold()
        return self._once[2], self._once[3]

    def content(self) -> totals.PrefixCache:
        """As in ``totals.json``."""
        self.fold()
        requests, hit, query_tokens, hit_tokens, external_hit, external_tokens = self._once
        return {
            "requests": requests,
            "requests_hit": hit,
            "query_tokens": query_tokens,
            "hit_tokens": hit_tokens,
            "external_requests_hit": external_hit,
            "external_hit_tokens": external_tokens,
            "fresh": _lookups(self._sums[FRESH]),
            "resumed": _lookups(self._sums["resumed"]),
            "skipped": _lookups(self._sums["skipped"]),
        }

    def saved(self) -> Any:
        """What ``restore`` takes; JSON keeps it exactly."""
        self.fold()
        counted = [[request, *found] for request, found in self._counted.items()]
        return [{name: list(sums) for name, sums in self._sums.items()}, list(self._once), counted]

    def restore(self, state: Any) -> None:
        """Go on where another one was."""
        sums, once, counted = state
        self._sums = {name: list(numbers) for name, numbers in sums.items()}
        self._once = list(once)
        self._counted = {request: tuple(found) for request, *found in counted}


def _lookups(sums: list[int]) -> totals.Lookups:
    lookups, query_tokens, hit_tokens = sums
    return {"lookups": lookups, "query_tokens": query_tokens, "hit_tokens": hit_tokens}
