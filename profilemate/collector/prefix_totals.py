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

_KINDS = {FIRST: "fresh", RETRY: "fresh", RESUMED: "resumed", SKIPPED: "skipped"}


class PrefixTotals:
    """Sums over the rows of the prefix cache's lookups."""

    def __init__(self) -> None:
        self._sums = {name: [0, 0, 0] for name in ("fresh", "resumed", "skipped")}
        """Lookups, tokens asked for, and tokens found."""
        self._once = [0] * 6
        """Requests, those that found something, tokens asked for and found; requests that found
        something outside, and these tokens."""
        self._counted: dict[int, tuple[int, int, int]] = {}

    def add(self, request: int, row: OpenRow, external: int, admitted: int) -> None:
        """A row of this request was written."""
        sums = self._sums[_KINDS[row.kind]]
        sums[0] += row.lookups
        sums[1] += row.query_tokens * row.lookups
        sums[2] += row.hit_tokens * row.lookups
        if admitted and row.kind in (FIRST, RETRY):
            before = self._counted.get(request)
            if before is not None:
                self._count(*before, -1)
            found = (row.query_tokens, row.hit_tokens, external)
            self._count(*found, 1)
            self._counted[request] = found

    def _count(self, query: int, hit: int, external: int, sign: int) -> None:
        once = self._once
        once[0] += sign
        once[1] += sign * (hit > 0)
        once[2] += sign * query
        once[3] += sign * hit
        once[4] += sign * (external > 0)
        once[5] += sign * external

    def forget(self, request: int) -> None:
        """The request has ended."""
        self._counted.pop(request, None)

    def forget_all(self) -> None:
        """No request is known any more."""
        self._counted.clear()

    def content(self) -> totals.PrefixCache:
        """As in ``totals.json``."""
        requests, hit, query_tokens, hit_tokens, external_hit, external_tokens = self._once
        return {
            "requests": requests,
            "requests_hit": hit,
            "query_tokens": query_tokens,
            "hit_tokens": hit_tokens,
            "external_requests_hit": external_hit,
            "external_hit_tokens": external_tokens,
            "fresh": _lookups(self._sums["fresh"]),
            "resumed": _lookups(self._sums["resumed"]),
            "skipped": _lookups(self._sums["skipped"]),
        }

    def state(self) -> Any:
        """What ``restore`` takes; JSON keeps it exactly."""
        counted = [[request, *found] for request, found in self._counted.items()]
        return [self._sums, self._once, counted]

    def restore(self, state: Any) -> None:
        """Go on where another one was."""
        sums, once, counted = state
        self._sums = {name: list(numbers) for name, numbers in sums.items()}
        self._once = list(once)
        self._counted = {request: tuple(found) for request, *found in counted}


def _lookups(sums: list[int]) -> totals.Lookups:
    lookups, query_tokens, hit_tokens = sums
    return {"lookups": lookups, "query_tokens": query_tokens, "hit_tokens": hit_tokens}
