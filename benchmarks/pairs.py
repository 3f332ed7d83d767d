# SPDX-License-Identifier: Apache-2.0
"""The same work with something and without it, in pairs of batches whose order is drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.environment import no_collection

Timed = Callable[[], int]
"""Does a batch of the work; returns the nanoseconds that it took."""


@dataclass(frozen=True)
class Times:
    """Microseconds of one piece of work: the median that is ``added``, and what it took ``off``.

    ``floor`` is what is added by the difference of the fastest batches.
    """

    added: float
    off: float
    floor: float


def compare(sides: Sequence[Timed], pairs: int, size: int, seed: int) -> list[Times]:
    """What each of the other sides adds to the first, with so many pieces of work in a batch."""
    draw = random.Random(seed)
    order = list(range(len(sides)))
    times: list[list[int]] = [[] for _ in sides]
    with no_collection():
        for _ in range(pairs):
            draw.shuffle(order)
            for index in order:
                times[index].append(sides[index]())
    off, *others = times
    return [added(off, on, size) for on in others]


def added(off: list[int], on: list[int], size: int) -> Times:
    """What one piece takes longer, from the nanoseconds of batches that were run in pairs."""
    differences = [with_it - without for without, with_it in zip(off, on, strict=True)]
    scale = 1e-3 / size
    return Times(median(differences) * scale, median(off) * scale, (min(on) - min(off)) * scale)


def note(found: Sequence[Times], what: str) -> str:
    """The figures of the middle one of repeated comparisons."""
    each = sorted(found, key=lambda times: times.added)[len(found) // 2]
    return (
        f"{each.added:+.2f} µs on {what} of {each.off:.1f} µs; "
        f"fastest on and off: {each.floor:+.2f} µs"
    )
