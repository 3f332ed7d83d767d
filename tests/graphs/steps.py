# SPDX-License-Identifier: Apache-2.0
"""What model runners are asked to execute, and what has to come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

MAX_TOKENS = 64
SIZES = (1, 2, 4, 8, 16)
"""Of batches that are captured."""


@dataclass
class Output:
    """What a scheduler scheduled: tokens of each request."""

    tokens: list[int] = field(default_factory=list)

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Of all requests together."""
        return sum(self.tokens)


def decode(requests: int) -> Output:
    """A step in which each request computes one token."""
    return Output([1] * requests)


def expected_output(values: list[float], pieces: int) -> list[float]:
    """What a model of so many pieces returns for these inputs, without tensors."""
    for number in range(pieces):
        values = [2 * value + number + 1 for value in values]
    return values


def called_in(module: str, function: Callable[..., Any], **globals: Any) -> Any:
    """The function, as if it were one of this module's."""
    return FunctionType(
        function.__code__,
        {"__builtins__": __builtins__, "__name__": module, **globals},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
