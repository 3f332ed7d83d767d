# SPDX-License-Identifier: Apache-2.0
"""What an attack counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One count or measure.

    ``most`` is the highest value that keeps the promise; None where the figure promises nothing.
    """

    name: str
    value: float
    unit: str = ""
    most: float | None = None

    @property
    def is_broken(self) -> bool:
        """Whether a promise does not hold."""
        return self.most is not None and self.value > self.most
