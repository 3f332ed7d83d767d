# SPDX-License-Identifier: Apache-2.0
"""The executions of one worker's whole run, for ``totals.json``."""

from __future__ import annotations

import csv
from typing import Any

from profilemate.format import totals

NONE = "NONE"
"""The mode of an execution without a graph."""

UNKNOWN = "unknown"
"""Stands for a mode that is not known."""

_Key = tuple[str, bool, bool]


class WorkerTotals:
    """Sums over a worker's executions, by mode, whether they replayed a graph, and dummies."""

    def __init__(self) -> None:
        self._sums: dict[_Key, list[int]] = {}
        self._batches: dict[tuple[str, bool, int], tuple[list[int], int]] = {}
        """The sums that a batch descriptor's executions are added to, and its padded tokens. There
        are as many as the worker has seen different ones."""

    def execute(self, cells: str, tokens: int, graphs: int, dummy: int) -> None:
        """A batch was executed: the cells of its descriptor, and its tokens without padding."""
        key = (cells, graphs > 0, dummy)
        known = self._batches.get(key)
        if known is None:
            known = self._batches[key] = self._batch(*key)
        sums, padded = known
        sums[0] += 1
        sums[1] += padded
        sums[2] += tokens

    def _batch(self, cells: str, replayed: bool, dummy: int) -> tuple[list[int], int]:
        mode, padded, *_ = next(csv.reader([cells]))
        key = (mode or UNKNOWN, replayed and mode != NONE, dummy > 0)
        return self._sums.setdefault(key, [0, 0, 0]), int(padded or 0)

    def content(self) -> list[totals.Executions]:
        """As in ``totals.json``."""
        return [
            {
                "mode": mode,
                "in_graph": in_graph,
                "dummy": dummy,
                "executions": executions,
                "padded_tokens": padded,
                "unpadded_tokens": unpadded,
            }
            for (mode, in_graph, dummy), sums in sorted(self._sums.items())
            for executions, padded, unpadded in [sums]
        ]

    def saved(self) -> Any:
        """What ``restore`` takes; JSON keeps it exactly."""
        return [[*key, list(sums)] for key, sums in self._sums.items()]

    def restore(self, state: Any) -> None:
        """Go on where another one was."""
        self._batches.clear()
        self._sums = {(mode, in_graph, dummy): list(sums) for mode, in_graph, dummy, sums in state}
