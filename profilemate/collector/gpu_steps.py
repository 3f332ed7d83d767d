# SPDX-License-Identifier: Apache-2.0
"""The steps that a worker executed, and how long they took on the GPU.

Each event is whole by itself, so there is nothing to remember from one to the next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from profilemate.collector.decode import ImpossibleError
from profilemate.collector.tables import Tables

TABLE = "gpu_steps.csv"

_COUNTS = 4
"""Tokens and requests, with which the values begin."""

_MOST = 1 << 31
"""No step has more tokens, requests or items."""

_MOST_NS = 1 << 53
"""What JSON numbers hold exactly."""


class GpuSteps:
    """Writes the rows of one worker. ``origin_ns`` is second 0 of the session."""

    def __init__(self, rank: int, origin_ns: int, tables: Tables) -> None:
        self._rank = rank
        self._origin = origin_ns
        self._append = tables.append(TABLE)

    def apply(self, time: int, blob: bytes) -> None:
        """Write the row of an event of ``More.PHASES``.

        Raises:
            ImpossibleError: no worker executes this.

        """
        try:
            *counts, gpu_ns, items, encoder_ns = json.loads(blob)
        except (ValueError, TypeError):
            raise ImpossibleError("a step that is not described as one") from None
        is_sound = len(counts) == _COUNTS and all(_is_count(n, _MOST) for n in (*counts, items))
        times = gpu_ns, encoder_ns
        if not is_sound or any(t is not None and not _is_count(t, _MOST_NS) for t in times):
            raise ImpossibleError("a step that no worker can have executed")
        if not _is_whole(counts):
            raise ImpossibleError("a step without tokens, or with a request that has none")
        cells = ",".join(map(str, counts))
        self._append(
            f"{(time - self._origin) / 1e9:.6f},{self._rank},{cells},{_microseconds(gpu_ns)},"
            f"{items},{_microseconds(encoder_ns)}"
        )


def _is_whole(counts: Sequence[int]) -> bool:
    """Whether there are tokens, and no request is without one."""
    prefill_tokens, decode_tokens, prefill_reqs, decode_reqs = counts
    return (
        prefill_tokens + decode_tokens > 0
        and prefill_reqs <= prefill_tokens
        and decode_reqs <= decode_tokens
    )


def _microseconds(nanoseconds: int | None) -> str:
    return "" if nanoseconds is None else str((nanoseconds + 500) // 1000)


def _is_count(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most
