# SPDX-License-Identifier: Apache-2.0
"""When was the page taken, and what did the session record after that?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import polars as pl

from analysis.engine_metrics.page import Page
from analysis.tables.metadata import wall_clock
from analysis.tables.session import Session

UNDER_WAY_SEC = 1.0
"""The page may lack what the engine did in so many seconds before it, and in its last three
steps."""

_NOT_ALL_SEC = 1e-6
"""Where a part of a session begins that has nearly all of it: at 0 it would be the whole."""


@dataclass(frozen=True)
class Seen:
    """The session as the page saw it. ``at``: when the page was taken, in seconds since the
    session began; None where the page has to have all of the session."""

    session: Session
    at: float | None

    def after(self) -> Session | None:
        """The session from the page's moment on; None where the page has all of it."""
        return None if self.at is None else self.session.after(self.at)

    def closing(self) -> Session | None:
        """The same, with what was under way at the page's moment."""
        if self.at is None:
            return None
        return self.session.after(max(_NOT_ALL_SEC, self.recent))

    @cached_property
    def recent(self) -> float:
        """The time, in seconds since the session began, from which the page may lack what the
        engine did. The results of a step come back a step or two after vLLM scheduled it, and only
        then go to the API server.

        Raises:
            SessionError: the table of steps cannot be read.

        """
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
        """The page's moment in the tables' time, in seconds; infinite where the page has all."""
        return math.inf if self.at is None else self.at


def moment(session: Session, page: Page) -> float | None:
    """When the page was taken, in seconds since the session began; None where that was not
    during the session, or is not known."""
    began = wall_clock(session.metadata.get("started_at"))
    if began is None or page.scraped_at is None:
        return None
    at = page.scraped_at - began
    return at if 0 <= at < session.end_sec else None
