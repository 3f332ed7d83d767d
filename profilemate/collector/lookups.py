# SPDX-License-Identifier: Apache-2.0
"""Turn lookups into rows: consecutive ones of a request with the same outcome are one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from profilemate.collector.requests import Request

FIRST, RETRY, RESUMED, SKIPPED = "first", "retry", "resumed", "skipped"

WINDOW_NS = 1_000_000_000
"""A row is written once it has been open for this long, so that a waiting request shows."""


@dataclass(slots=True)
class OpenRow:
    """Lookups of one request that all had the same outcome so far."""

    began: int
    last: int
    query_tokens: int
    hit_tokens: int
    kind: str
    lookups: int
    frame: int
    loading: bool = False
    """The request got blocks, but waits for a transfer before it runs."""


Emit = Callable[[Request, OpenRow, int, int], None]


class Lookups:
    """The open rows of one engine. ``emit(request, row, external, admitted)`` writes one.

    ``preemptions_lost``: preemptions are no longer recorded, so a request that has run before
    counts as preempted. ``block_size``: of what is known by its content, in tokens.
    """

    def __init__(self, emit: Emit, block_size: int) -> None:
        self._block_size = block_size
        self.preemptions_lost = False
        self._emit = emit
        self._open: dict[int, OpenRow] = {}
        self._seen: set[int] = set()

    def saved(self) -> dict[str, Any]:
        """All of it, as JSON."""
        rows = [[number, asdict(row)] for number, row in self._open.items()]
        return {"open": rows, "seen": sorted(self._seen), "lost": self.preemptions_lost}

    def restore(self, saved: dict[str, Any]) -> None:
        """Be as when it was ``saved``."""
        self._open = {number: OpenRow(**row) for number, row in saved["open"]}
        self._seen, self.preemptions_lost = set(saved["seen"]), saved["lost"]

    def looked_up(
        self, request: Request, query: int, hit: int, skipped: bool, time: int, frame: int
    ) -> None:
        """The scheduler looked a request up, in this ``frame``: each step is another."""
        row = self._open.get(request.number)
        if row is not None and row.frame == frame:
            # The step could not use the first answer and asked again: only this one counts.
            if row.lookups == 1:
                row.query_tokens, row.hit_tokens = query, hit
                return
            row.lookups -= 1
        kind = self._kind(request, skipped)
        same = row is not None and (row.query_tokens, row.hit_tokens, row.kind) == (
            query,
            hit,
            kind,
        )
        if row is not None and same and time - row.began < WINDOW_NS:
            row.lookups += 1
            row.last, row.frame = time, frame
            return
        self._close(request)
        self._seen.add(request.number)
        self._open[request.number] = OpenRow(time, time, query, hit, kind, 1, frame)

    def repeated(self, requests: list[Request], count: int, time: int) -> None:
        """The last step's lookups were repeated ``count`` times, the last time at ``time``."""
        for request in requests:
            row = self._open.get(request.number)
            if row is None:
                continue
            if row.kind == FIRST:
                self._close(request)
                row = replace(row, began=time, kind=RETRY, lookups=0)
                self._open[request.number] = row
            row.lookups += count
            row.last = time
            if time - row.began >= WINDOW_NS:
                self._close(request)
                self._open[request.number] = replace(row, began=time, lookups=0)

    def allocated(self, request: Request) -> None:
        """The request got blocks, but does not run yet."""
        row = self._open.get(request.number)
        if row is not None:
            row.loading = True

    def admitted(self, request: Request, computed_tokens: int) -> None:
        """The request runs from now on, with so many tokens computed already."""
        row = self._open.pop(request.number, None)
        if row is None or not row.lookups:
            return
        if row.lookups > 1:
            # Only the last lookup led to the admission.
            self._emit(request, replace(row, lookups=row.lookups - 1), 0, 0)
            row = replace(row, began=row.last, lookups=1)
        if row.loading and computed_tokens == row.query_tokens - 1:
            # A load ends where a block does, or where the prompt ends. There vLLM computes the last
            # token again, for what comes after it.
            computed_tokens += bool(computed_tokens % self._block_size)
        external = max(0, computed_tokens - row.hit_tokens)
        if row.kind in (FIRST, RETRY):
            request.hit_tokens, request.external_hit_tokens = row.hit_tokens, external
        self._emit(request, row, external, 1)

    def came_before(self, request: Request) -> None:
        """The request was there when the recording went on: no lookup of it is the first."""
        self._seen.add(request.number)

    def ended(self, request: Request) -> None:
        """The request has ended: write its open row."""
        self._close(request)
        self._seen.discard(request.number)

    def close_all(self, requests: dict[int, Request]) -> None:
        """Nothing more comes: write every open row."""
        for number in list(self._open):
            if number in requests:
                self._close(requests[number])

    def forget_all(self) -> None:
        """Of the requests so far nothing more comes."""
        self._open.clear()
        self._seen.clear()

    def _kind(self, request: Request, skipped: bool) -> str:
        if skipped:
            return SKIPPED
        if request.preemptions or (self.preemptions_lost and request.admitted is not None):
            return RESUMED
        return RETRY if request.number in self._seen else FIRST

    def _close(self, request: Request) -> None:
        row = self._open.pop(request.number, None)
        if row is not None and row.lookups:
            self._emit(request, row, 0, int(row.loading))
