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
    Attack("guests", "other tools in the same process, real ones and made-up ones", 200, 6),
    Attack("exits", "ends of a process, with and without recording", 2, 4),
)
