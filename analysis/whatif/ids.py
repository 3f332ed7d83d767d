# SPDX-License-Identifier: Apache-2.0
"""Lists of numbers with different lengths, one for each request, in two arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Ids:
    """``values``: the numbers of all lists, one list after the other. ``offsets``: where each list
    begins in them, and where the last one ends."""

    values: Ints
    offsets: Ints

    @classmethod
    def of(cls, lists: Iterable[Sequence[int]]) -> Ids:
        """Lists with these numbers."""
        arrays = [np.asarray(numbers, np.int64) for numbers in lists]
        values = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
        return cls(values, offsets(np.array([len(array) for array in arrays], np.int64)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> Ints:
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    def __iter__(self) -> Iterator[Ints]:
        return (self[number] for number in range(len(self)))

    @property
    def lengths(self) -> Ints:
        """The length of each list."""
        return np.diff(self.offsets)

    @property
    def rows(self) -> Ints:
        """For each value, the number of its list."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def positions(self) -> Ints:
        """For each value, its place in its list."""
        return np.arange(len(self.values)) - np.repeat(self.offsets[:-1], self.lengths)

    def take(self, chosen: Ints) -> Ids:
        """The lists with these numbers, in this order."""
        lengths = self.lengths[chosen]
        ends = offsets(lengths)
        at = np.arange(ends[-1]) + np.repeat(self.offsets[:-1][chosen] - ends[:-1], lengths)
        return Ids(self.values[at], ends)

    def head(self, lengths: Ints) -> Ids:
        """The first values of each list, at most so many."""
        kept = np.minimum(self.lengths, np.maximum(lengths, 0))
        return Ids(self.values[self.positions < np.repeat(kept, self.lengths)], offsets(kept))

    def __add__(self, other: Ids) -> Ids:
        """Each list, followed by the list of ``other`` with the same number."""
        lengths = self.lengths + other.lengths
        ends = offsets(lengths)
        values = np.empty(ends[-1], np.int64)
        values[np.repeat(ends[:-1], self.lengths) + self.positions] = self.values
        after = ends[:-1] + self.lengths
        values[np.repeat(after, other.lengths) + other.positions] = other.values
        return Ids(values, ends)


def offsets(lengths: Ints) -> Ints:
    """Where lists of these lengths begin, and where the last one ends: one more than lists."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
