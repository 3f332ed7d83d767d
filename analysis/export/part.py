# SPDX-License-Identifier: Apache-2.0
"""Which part of a session is exported?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import polars as pl

from analysis.errors import SessionError
from analysis.tables.schema import TABLES
from analysis.tables.session import Session


@dataclass(frozen=True)
class Part:
    """``begin_sec`` and ``end_sec``: rows outside of them are left out; None for no limit.

    ``requests``: ids of the only requests that have tracks; None for all of them.
    """

    begin_sec: float | None = None
    end_sec: float | None = None
    requests: frozenset[str] | None = None

    def is_in(self, name: str) -> pl.Expr:
        """Whether a row of this table lies within the limits of time."""
        known = TABLES[name]
        return self.covers(pl.col(known.time) * known.time_unit)

    def covers(self, begin: pl.Expr, end: pl.Expr | None = None) -> pl.Expr:
        """Whether something from ``begin`` to ``end``, in seconds, is within them, or reaches into
        them."""
        parts = [pl.lit(value=True)]
        if self.begin_sec is not None:
            parts.append((begin if end is None else end) >= self.begin_sec)
        if self.end_sec is not None:
            parts.append(begin < self.end_sec)
        return pl.all_horizontal(parts)

    def names(self, *columns: str) -> pl.Expr:
        """Whether one of these columns names a request that is wanted."""
        if self.requests is None:
            return pl.lit(value=True)
        wanted = pl.Series(sorted(self.requests), dtype=pl.String).implode()
        return pl.any_horizontal(pl.col(*columns).is_in(wanted).fill_null(value=False))


WHOLE = Part()


def resolved(session: Session, part: Part) -> Part:
    """The part with whole ids for those that are given by their beginnings.

    Raises:
        SessionError: the session ended before, or not just one of its requests has such an id.

    """
    if part.begin_sec is not None and part.begin_sec >= session.end_sec:
        raise SessionError(
            f"nothing is left of {session.directory}: it ended after {session.end_sec:.6g} s, and "
            f"the window begins at {part.begin_sec:.6g} s; choose an earlier window"
        )
    if part.requests is None:
        return part
    wanted = sorted(part.requests)
    known: dict[str, set[str]] = {text: set() for text in wanted}
    for batch in session.batches("requests", ["request_id"]):
        for text, ids in known.items():
            ids.update(batch.filter(pl.col("request_id").str.starts_with(text))["request_id"])
    return replace(
        part, requests=frozenset(_only(session, text, ids) for text, ids in known.items())
    )


def _only(session: Session, text: str, ids: set[str]) -> str:
    """The id that is meant: this one, or the only one that begins with it."""
    if text in ids:
        return text
    if len(ids) == 1:
        return ids.pop()
    if not ids:
        raise SessionError(
            f"{session.directory}: requests.jsonl has no request {text!r} that ended, and none "
            "whose id begins so; take the ids from there"
        )
    shown = ", ".join(repr(each) for each in sorted(ids)[:_NEAR])
    raise SessionError(
        f"{session.directory}: the ids of {len(ids):,} requests begin with {text!r}; give more of "
        f"one of them: {shown}{' …' if len(ids) > _NEAR else ''}"
    )


_NEAR = 5
"""Ids that are named where several begin so."""
