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
    Attack("raising", "an error at each line of the hooks and of what writes", 5_500, 40),
    Attack("disk", "a disk that hangs, while events wait that hold much", 4, 10),
)
