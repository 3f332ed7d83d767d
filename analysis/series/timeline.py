# SPDX-License-Identifier: Apache-2.0
"""When did each request wait, compute its prompt, and answer?

No chart can show a hundred thousand requests. So it shows every n-th one of those that ended,
evenly over the session.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

DRAWN = 300
"""Requests in the chart at most."""

COLUMNS = (
    "timestamp",
    "request_id",
    "engine",
    "input_length",
    "output_length",
    "hit_tokens",
    "preemptions",
    "finish_reason",
    "queue_sec",
    "first_token_sec",
    "finish_sec",
)


@dataclass(frozen=True)
class Span:
    """A request. Its times are in seconds since the session began; ``admitted_sec`` and
    ``first_token_sec`` are None where it did not get so far. ``hit_tokens``: tokens of its prompt
    that it found in the prefix cache."""

    request_id: str
    engine: int
    arrived_sec: float
    admitted_sec: float | None
    first_token_sec: float | None
    ended_sec: float
    input_tokens: int
    output_tokens: int
    hit_tokens: int
    preemptions: int
    finish_reason: str


@dataclass(frozen=True)
class Timeline:
    """``spans``: one of every ``one_in`` requests, by arrival. ``ended``: how many ended."""

    spans: tuple[Span, ...]
    one_in: int
    ended: int


@dataclass
class TimelineTally:
    """Every ``one_in``-th row of requests.jsonl."""

    one_in: int
    _seen: int = 0
    _rows: list[pl.DataFrame] = field(default_factory=list)

    @classmethod
    def of(cls, ended: int) -> TimelineTally:
        """A tally that takes at most ``DRAWN`` of so many requests."""
        return cls(max(1, -(-ended // DRAWN)))

    def add(self, batch: pl.DataFrame) -> None:
        offset = -self._seen % self.one_in
        self._seen += batch.height
        self._rows.append(batch.select(COLUMNS).gather_every(self.one_in, offset))

    def result(self) -> Timeline:
        if not self._rows:
            return Timeline((), self.one_in, 0)
        arrived = pl.col("timestamp") / 1e3
        rows = (
            pl.concat(self._rows)
            .drop_nulls(["timestamp", "finish_sec"])
            .select(
                pl.col("request_id").fill_null(""),
                pl.col("engine").fill_null(0),
                arrived,
                admitted_sec=arrived + pl.col("queue_sec"),
                first_token_sec="first_token_sec",
                finish_sec="finish_sec",
                input_length=pl.col("input_length").fill_null(0),
                output_length=pl.col("output_length").fill_null(0),
                hit_tokens=pl.col("hit_tokens").fill_null(0),
                preemptions=pl.col("preemptions").fill_null(0),
                finish_reason=pl.col("finish_reason").fill_null("unknown"),
            )
            .sort("timestamp", maintain_order=True)
        )
        return Timeline(tuple(Span(*row) for row in rows.iter_rows()), self.one_in, self._seen)
