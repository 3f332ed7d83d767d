# SPDX-License-Identifier: Apache-2.0
"""What a piece of advice consists of, and from where on a figure is worth one."""

from __future__ import annotations

from analysis.summary import Summary

UNDER_USED_PCT = 40.0
OVER_USED_PCT = 90.0
SHORT_LIFETIME_SEC = 5.0
LONG_LIFETIME_SEC = 60.0
"""The guide's rules: a pool under 40 % is larger than the load needs, over 90 % it is too small;
blocks that live for less than 5 s leave before they can be found again, and those that live for
more than 60 s had every chance."""

MUCH = 0.05
"""A share of the prompts' tokens, of the time or of the work that is worth a change."""
SOME = 0.01
COVERED = 0.9
"""The guide's rule: over 90 % of executions should run in CUDA graphs."""
MOST = 0.25
"""A share of all waiting that makes a reason the one to look at."""
ROOM_PCT = 80.0
"""Below this usage the pool has room for more requests at once."""
LARGEST_UTILIZATION = 0.95
FEW = 10
"""Fewer requests than this say nothing of a load."""


def waited_for(summary: Summary, *reasons: str) -> float:
    """The share of all waiting that was for these reasons."""
    waiting = summary.waiting.by_reason
    return sum(waiting[reason].share for reason in reasons if reason in waiting)


def waits(summary: Summary) -> bool:
    """Whether requests waited so long that it matters: a twentieth of the time until their first
    token."""
    queued, first = summary.scheduling.queued.mean_sec, summary.scheduling.first_token.mean_sec
    return queued is not None and first is not None and queued >= MUCH * first
