# SPDX-License-Identifier: Apache-2.0
"""How much of a session is kept: VLLM_PROFILING_KEEP.

5GB        at most so many bytes, the oldest segments go first; MB and TB are known, too
6h         the last six hours; s, m and d are known, too
5GB,6h     both
all        everything
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT_BYTES = 2_000_000_000

OF_FREE = 10
"""By default a session takes a tenth of what is free on its disk, at most."""

EVERYTHING = "all"

_PART = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([a-z]{1,3})", re.ASCII)

_SIZES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True)
class Keep:
    """What is kept of a session.

    ``most_bytes``: of everything in it; None: no limit. ``most_sec``: how old it may be; None: no
    limit. ``of_free``: not more than a tenth of what is free, either.
    """

    most_bytes: float | None
    most_sec: float | None
    of_free: bool = False


DEFAULT = Keep(DEFAULT_BYTES, None, of_free=True)
ALL = Keep(None, None)


def read_keep(text: str) -> Keep | None:
    """What is asked for; None where that is not understood.

    >>> read_keep("5GB, 6h"), read_keep("all") == ALL, read_keep("") == DEFAULT, read_keep("x")
    (Keep(most_bytes=5000000000.0, most_sec=21600.0, of_free=False), True, True, None)
    """
    wanted = text.strip().lower()
    if not wanted:
        return DEFAULT
    if wanted == EVERYTHING:
        return ALL
    most_bytes = most_sec = None
    for part in wanted.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            return None
        number, unit = float(match[1]), match[2]
        if unit in _SIZES and most_bytes is None and number:
            most_bytes = number * _SIZES[unit]
        elif unit in _TIMES and most_sec is None and number:
            most_sec = number * _TIMES[unit]
        else:
            return None
    return Keep(most_bytes, most_sec)
