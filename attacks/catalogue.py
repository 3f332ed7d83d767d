# SPDX-License-Identifier: Apache-2.0
"""The attacks, and what each does. ``attacks/NAME.py`` has a function

    run(count: int, seed: int, folder: Path) -> list[Figure]

which makes ``count`` attempts, whose random choices follow from ``seed``, with files in ``folder``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attack:
    """``count``: how many attempts a full run makes; ``minutes``: about how long it takes on two
    cores."""

    name: str
    about: str
    count: int
    minutes: float


CATALOGUE: tuple[Attack, ...] = (
    Attack("tables", "read sessions with damaged tables and metadata", 20_000, 40),
)
