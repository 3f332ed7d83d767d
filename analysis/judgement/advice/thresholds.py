# SPDX-License-Identifier: Apache-2.0
"""From where on is a figure worth a piece of advice?"""

from __future__ import annotations

from analysis.summary import Summary

UNDER_USED_PCT = 40.0
OVER_USED_PCT = 90.0
SHORT_LIFETIME_SEC = 5.0
LONG_LIFETIME_SEC = 60.0
"""Rules of thumb. A pool with usage under 40 % is larger than the load needs; over 90 % it is too
small. Blocks that live for less than 5 s are evicted before a request can find them again; those
that live for more than 60 s had every chance."""

MUCH = 0.05
"""This share of the prompts' tokens, of the time or of the work is worth a change."""
SOME = 0.01
COVERED = 0.9
"""Rule of thumb: over 90 % of executions should run in CUDA graphs."""
MOST = 0.25
"""A reason for this share of all waiting is the one to look at."""
ROOM_PCT = 80.0
"""Under this usage the pool has room for more requests at once."""
LARGEST_UTILIZATION = 0.95
FEW = 10
"""Fewer requests say nothing about a load."""


def waited_for(summary: Summary, *reasons: str) -> float:
    """The share of all waiting that was for these reasons, from 0 to 1."""
    waiting = summary.waiting.by_reason
    return sum(waiting[reason].share for reason in reasons if reason in waiting)


def waits(summary: Summary) -> bool:
    """Whether requests waited so long that it matters: a twentieth of the time until their first
    token or more."""
    queued, first = summary.scheduling.queued.mean_sec, summary.scheduling.first_token.mean_sec
    return queued is not None and first is not None and queued >= MUCH * first
