# SPDX-License-Identifier: Apache-2.0
"""What does totals.json say of the whole run, whatever is left of its tables?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.errors import SessionError, unreadable
from analysis.tables.faults import no_number
from analysis.tables.files import opened
from analysis.tables.metadata import part, parts
from profilemate.format.totals import FORMAT_VERSION, MAX_BYTES, TOTALS_FILE


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
    path = directory / TOTALS_FILE
    try:
        with opened(path) as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        found = json.loads(content, parse_constant=no_number)
    except (ValueError, RecursionError):
        found = None
    if len(content) > MAX_BYTES or not isinstance(found, Mapping):
        raise SessionError(f"{path} is damaged; restore the recorded file, or remove it")
    version = found.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        return None
    return _totals(found)


def _totals(found: Mapping[str, Any]) -> RunTotals:
    engines = parts(found, "engines")
    caches = [part(engine, "prefix_cache") for engine in engines]
    requests = [part(engine, "requests") for engine in engines]
    pools = [pool for engine in engines for pool in parts(engine, "pools")]
    groups = [group for pool in pools for group in parts(pool, "groups")]
    evictions = [each for pool in pools for each in parts(pool, "evictions")]
    by_reason: dict[str, int] = {}
    for reason, count in _reasons(requests):
        by_reason[reason] = by_reason.get(reason, 0) + count
    query_tokens, hit_tokens = _sum(caches, "query_tokens"), _sum(caches, "hit_tokens")
    return RunTotals(
        until_sec=_count(found.get("until_ns")) / 1e9,
        requests=_sum(caches, "requests"),
        ended=sum(by_reason.values()),
        by_reason=dict(sorted(by_reason.items(), key=lambda one: (-one[1], one[0]))),
        input_tokens=_sum(requests, "prompt_tokens"),
        output_tokens=_sum(requests, "output_tokens"),
        preemptions=_sum(requests, "preemptions"),
        query_tokens=query_tokens,
        hit_tokens=hit_tokens,
        token_rate=hit_tokens / query_tokens if query_tokens else None,
        allocated_blocks=_sum(groups, "allocated_blocks"),
        evicted_blocks=_sum(evictions, "blocks"),
        never_reused_blocks=_sum(evictions, "never_reused"),
        peak_held_blocks=_count(found.get("peak_held_blocks")),
    )


def _reasons(requests: list[Mapping[str, Any]]) -> Iterator[tuple[str, int]]:
    for each in requests:
        for reason, count in part(each, "finished").items():
            yield str(reason), _count(count)


def _sum(entries: list[Mapping[str, Any]], name: str) -> int:
    return sum(_count(entry.get(name)) for entry in entries)


def _count(value: Any) -> int:
    """The number, of any size; 0 for any other value."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_count else 0
