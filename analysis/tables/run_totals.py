# SPDX-License-Identifier: Apache-2.0
"""What does totals.json say of the whole run, whatever is left of its tables?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from analysis.errors import unreadable
from analysis.tables.files import opened
from profilemate.format import totals
from profilemate.format.totals import MAX_BYTES, TOTALS_FILE, NewerTotalsError, checked


@dataclass(frozen=True)
class RunTotals:
    """``until_sec``: time of the last event that is counted, in seconds since the run began.

    ``requests``: that were admitted, of which ``ended`` have, ``by_reason``. ``input_tokens``,
    ``output_tokens``: of those that ended. ``query_tokens``, ``hit_tokens``: of the lookup that led
    to each admission; ``token_rate``: the share found, None without a lookup. ``allocated_blocks``,
    ``evicted_blocks``, of these ``never_reused_blocks``: over all pools. ``peak_held_blocks``: most
    that requests held at once, in all pools together.
    """

    until_sec: float
    requests: int
    ended: int
    by_reason: Mapping[str, int]
    input_tokens: int
    output_tokens: int
    preemptions: int
    query_tokens: int
    hit_tokens: int
    token_rate: float | None
    allocated_blocks: int
    evicted_blocks: int
    never_reused_blocks: int
    peak_held_blocks: int


def read(directory: Path) -> RunTotals | None:
    """The figures; None without the file, or where a newer profilemate wrote it.

    Raises:
        SessionError: the file cannot be read, or is damaged.

    """
    found = whole(directory)
    return None if found is None else _totals(found)


def whole(directory: Path) -> totals.RunTotals | None:
    """All of the file; None without it, or where a newer profilemate wrote it.

    Raises:
        SessionError: the file cannot be read, or is damaged.

    """
    path = directory / TOTALS_FILE
    try:
        with opened(path) as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        return checked(content, path)
    except NewerTotalsError:
        return None


def _totals(found: totals.RunTotals) -> RunTotals:
    caches = [engine["prefix_cache"] for engine in found["engines"]]
    requests = [engine["requests"] for engine in found["engines"]]
    pools = [pool for engine in found["engines"] for pool in engine["pools"]]
    groups = [group for pool in pools for group in pool["groups"]]
    evictions = [each for pool in pools for each in pool["evictions"]]
    by_reason: Counter[str] = Counter()
    for each in requests:
        by_reason.update(each["finished"])
    query_tokens = sum(cache["query_tokens"] for cache in caches)
    hit_tokens = sum(cache["hit_tokens"] for cache in caches)
    return RunTotals(
        until_sec=found["until_ns"] / 1e9,
        requests=sum(cache["requests"] for cache in caches),
        ended=sum(by_reason.values()),
        by_reason=dict(sorted(by_reason.items(), key=lambda one: (-one[1], one[0]))),
        input_tokens=sum(each["prompt_tokens"] for each in requests),
        output_tokens=sum(each["output_tokens"] for each in requests),
        preemptions=sum(each["preemptions"] for each in requests),
        query_tokens=query_tokens,
        hit_tokens=hit_tokens,
        token_rate=hit_tokens / query_tokens if query_tokens else None,
        allocated_blocks=sum(group["allocated_blocks"] for group in groups),
        evicted_blocks=sum(each["blocks"] for each in evictions),
        never_reused_blocks=sum(each["never_reused"] for each in evictions),
        peak_held_blocks=found["peak_held_blocks"],
    )
