# SPDX-License-Identifier: Apache-2.0
"""The tables of a worker's MoE layers, from what it counted of their experts.

Each event is whole by itself, so there is nothing to remember from one to the next.
"""

from __future__ import annotations

import json
import math
from typing import Any

from profilemate.collector.decode import ImpossibleError
from profilemate.collector.tables import Tables
from profilemate.collector.worker_totals import WorkerTotals
from profilemate.format.events import More

EXPERTS_TABLE = "moe_experts.csv"
PAIRS_TABLE = "moe_pairs.csv"

MOST_LAYERS = 1 << 12
MOST_EXPERTS = 1 << 16
MOST_TOKENS = 1 << 53
"""What JSON numbers hold exactly."""


class Experts:
    """Writes the rows of one worker, and counts its tokens in ``totals``. ``origin_ns`` is second
    0 of the session."""

    def __init__(self, rank: int, origin_ns: int, tables: Tables, totals: WorkerTotals) -> None:
        self._rank = rank
        self._totals = totals
        self._origin = origin_ns
        self._experts = tables.append(EXPERTS_TABLE)
        self._pairs = tables.append(PAIRS_TABLE)

    def apply(self, time: int, kind: int, blob: bytes) -> None:
        """Write the rows of an event of ``Op.MORE``.

        Raises:
            ImpossibleError: no worker counts this.

        """
        try:
            values = json.loads(blob)
            if kind == More.EXPERTS:
                self._add_experts(time, *values)
            else:
                self._add_pairs(time, *values)
        except (ValueError, TypeError) as error:
            raise ImpossibleError(f"experts that are not counted as such: {error}") from None

    def _add_experts(self, time: int, since: int, tokens: int, layers: list[Any]) -> None:
        _require(_is_count(since, time) and since >= self._origin, "a time")
        _require(_is_count(tokens) and len(layers) <= MOST_LAYERS, "tokens")
        rows = []
        begin = f"{self._seconds(time)},{self._seconds(since)},{self._rank}"
        for layer, counts, *more in layers:
            _require(len(more) <= 1, "a layer")
            ranks = more[0] if more and more[0] is not None else []
            _require(all(_is_count(count) for count in ranks), "tokens of a rank")
            _require(_is_count(layer) and 0 < len(counts) <= MOST_EXPERTS, "a layer")
            _require(all(_is_count(count, tokens) for count in counts), "tokens of an expert")
            by_expert, by_rank = (" ".join(map(str, each)) for each in (counts, ranks))
            rows.append(f"{begin},{layer},{tokens},{by_expert},{by_rank}")
        if rows:
            self._experts("\n".join(rows))
        for layer, counts, *_ in layers:
            self._totals.route(layer, tokens, counts)

    def _add_pairs(self, time: int, tokens: int, pairs: list[Any]) -> None:
        rows = []
        begin = f"{self._seconds(time)},{self._rank}"
        for layer, one, other, both, expected, of_one, of_other in pairs:
            _require(_is_count(layer) and _is_count(one) and _is_count(other), "a pair")
            _require(
                all(_is_count(count, tokens) for count in (both, of_one, of_other)),
                "tokens of a pair",
            )
            _require(both <= min(of_one, of_other), "tokens of a pair")
            _require(math.isfinite(expected) and expected >= 0, "expected tokens")
            cells = layer, one, other, tokens, both, f"{expected:.3f}", of_one, of_other
            rows.append(f"{begin},{','.join(map(str, cells))}")
        if rows:
            self._pairs("\n".join(rows))

    def _seconds(self, time: int) -> str:
        return f"{(time - self._origin) / 1e9:.6f}"


def _is_count(value: Any, most: int = MOST_TOKENS) -> bool:
    return type(value) is int and 0 <= value <= most


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ImpossibleError(f"{what} that no worker can have counted")
