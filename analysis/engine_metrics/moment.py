# SPDX-License-Identifier: Apache-2.0
"""Up to when vLLM had counted, and what of the session lies after that."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import polars as pl

from analysis.engine_metrics.page import Page
from analysis.tables.metadata import wall_clock
from analysis.tables.session import Session

UNDER_WAY_SEC = 1.0
"""What a running engine did in so long before the page was taken, and in its last three steps, may
not be on it yet."""

_NOT_ALL_SEC = 1e-6
"""A session that begins later than at 0 is a part of it."""


@dataclass(frozen=True)
class Seen:
    """The session, and ``at``: the moment up to which vLLM had counted; None for all of it."""

    session: Session
    at: float | None

    def after(self) -> Session | None:
        """What the session has from the page's moment on."""
        return None if self.at is None else replace(self.session, begin_sec=self.at)

    def closing(self) -> Session | None:
        """The same, and what was under way then."""
        if self.at is None:
            return None
        return replace(self.session, begin_sec=max(_NOT_ALL_SEC, self.recent))

    @cached_property
    def recent(self) -> float:
        """From when on what the engine did may not be on the page: results come back a step or
        two after it was scheduled, and go to the API server then."""
        if self.at is None:
            return math.inf
        time = pl.col("timestamp_sec")
        third = self.session.collect(
            "scheduler_steps",
            lambda steps: (
                steps.filter(time <= self.at)
                .group_by("engine")
                .agg(time.top_k(3).min())
                .select(time.min())
            ),
        ).item()
        return min(self.at - UNDER_WAY_SEC, math.inf if third is None else third)

    @property
    def cut(self) -> float:
        """The page's moment, as a time that may be compared with those in the tables."""
        return math.inf if self.at is None else self.at


def moment(session: Session, page: Page) -> float | None:
    """When the page was taken, in the session's time; None where that was not within it."""
    began = wall_clock(session.metadata.get("started_at"))
    if began is None or page.scraped_at is None:
        return None
    at = page.scraped_at - began
    return at if 0 <= at < session.end_sec else None
