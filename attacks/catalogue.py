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
    Attack("kill_completing", "kills while a session is completed", 1_500, 12),
    Attack("planted", "links in the place of what profilemate writes", 3_000, 12),
    Attack("journals", "journals damaged and forged in every way", 300_000, 40),
    Attack("secrets", "look for secrets in what is kept of command lines", 200_000, minutes=1),
    Attack("configs", "plan models whose config.json has odd values", count=30_000, minutes=4),
    Attack("kills_server", "signals at random moments, to the processes of vllm serve", 20, 20),
    Attack("same_results", "the same requests with and without profilemate", 1000, 15),
    Attack("kills", "signals at random moments, to an engine and to its collector", 200, 15),
    Attack("quick_kills", "kills of an engine that never waits: what they cost", 200, 6),
    Attack("tables", "read sessions with damaged tables and metadata", 20_000, 40),
    Attack("guests", "other tools in the same process, real ones and made-up ones", 200, 6),
    Attack("exits", "ends of a process, with and without recording", 2, 4),
    Attack("raising", "an error at each line of the hooks and of what writes", 5_500, 40),
    Attack("disk", "a disk that hangs, while events wait that hold much", 4, 10),
)
