# SPDX-License-Identifier: Apache-2.0
"""The executions of one worker's whole run, and its experts' tokens, for ``totals.json``."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Any

from profilemate.format import totals

NONE = "NONE"
"""The mode of an execution without a graph."""

UNKNOWN = "unknown"
"""Stands for a mode that is not known."""

_Key = tuple[str, bool, bool]


class WorkerTotals:
    """Sums over a worker's executions, by mode, whether they replayed a graph, and dummies; and
    over the tokens of its experts, by layer."""

    def __init__(self) -> None:
        self._sums: dict[_Key, list[int]] = {}
        self._experts: dict[int, tuple[list[int], list[int]]] = {}
        """By layer its routed tokens, alone in a list, and the tokens of each expert."""
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

    def route(self, layer: int, tokens: int, by_expert: Sequence[int]) -> None:
        """A layer routed so many tokens, so many of them to each expert."""
        routed, sums = self._experts.setdefault(layer, ([0], []))
        routed[0] += tokens
        sums.extend([0] * (len(by_expert) - len(sums)))
        for expert, count in enumerate(by_expert):
            sums[expert] += count

    def experts(self) -> list[totals.Experts]:
        """As in ``totals.json``."""
        return [
            {"layer": layer, "routed_tokens": routed, "by_expert": sums}
            for layer, ((routed,), sums) in sorted(self._experts.items())
        ]

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
        return {
            "executions": [[*key, list(sums)] for key, sums in self._sums.items()],
            "experts": [[layer, *map(list, each)] for layer, each in self._experts.items()],
        }

    def restore(self, state: Any) -> None:
        """Go on where another one was."""
        self._batches.clear()
        self._sums = {
            (mode, in_graph, dummy): list(sums)
            for mode, in_graph, dummy, sums in state["executions"]
        }
        self._experts = {
            layer: (list(routed), list(sums)) for layer, routed, sums in state["experts"]
        }
