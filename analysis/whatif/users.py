# SPDX-License-Identifier: Apache-2.0
"""Which answer does a request come after, and how long after it, if its user waits for answers?

A user has a conversation, and sends each turn some time after the answer to the one before. Where a
trace does not say which answer that is, contents do: a request is a turn of the conversation that
its prompt continues (``analysis.whatif.ceiling``), if that answer had ended when it came.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from analysis.whatif import ceiling, references
from analysis.whatif.ids import Ints
from analysis.whatif.workload import Floats, Workload

EACH = 0
"""In place of a number of users: each conversation has one of its own, who begins as recorded."""


@dataclass(frozen=True)
class Turns:
    """``after``: for each request the number of the one whose answer it comes after, -1 for the
    first turn of a conversation. ``think_sec``: how long after it; 0 for first turns."""

    after: Ints
    think_sec: Floats

    @property
    def first(self) -> Ints:
        """For each request, the first turn of its conversation."""
        found: dict[int, int] = {}

        def root(number: int) -> int:
            path = []
            while number not in found and self.after[number] >= 0:
                path.append(number)
                number = int(self.after[number])
            begin = found.setdefault(number, number)
            found.update(dict.fromkeys(path, begin))
            return begin

        return np.array([root(number) for number in range(len(self.after))], np.int64)


def turns(workload: Workload) -> Turns:
    """The turns of one engine's requests."""
    if (workload.waits_for >= 0).any() or not workload.has_contents:
        return Turns(workload.waits_for, workload.delay_sec)
    order = np.argsort(workload.seen_sec, kind="stable")
    known = workload.take(order)
    chains = known.chains()
    rows = np.arange(len(known))
    seen = references.of_chains(
        chains,
        readable=chains.lengths,
        needs=chains.lengths,
        freed=rows,
        counts=known.counts,
        block_size=known.block_size,
        input_tokens=known.input_tokens,
    )
    before = ceiling.turns_before(seen, references.first_user(seen))
    answered = np.where(before >= 0, known.finish_sec[before], np.nan)
    # A comparison with what is not known is false.
    follows = known.seen_sec >= answered
    # It was seen at the end of a step, in the middle of which it came.
    think = np.maximum(known.arrival_sec - answered, 0)
    after = np.full(len(known), -1)
    after[order[follows]] = order[before[follows]]
    think_sec = np.zeros(len(known))
    think_sec[order[follows]] = think[follows]
    return Turns(after, think_sec)


def notes(workload: Workload, users: tuple[int | None, ...]) -> Iterator[str]:
    """What is known of the conversations, where any number of users is tried."""
    if all(one is None for one in users):
        return
    found = [turns(workload.of_engine(engine)) for engine in workload.engines]
    later = sum(int((one.after >= 0).sum()) for one in found)
    yield (
        f"--users: {len(workload) - later:,} requests begin a conversation, and {later:,} come "
        "after an answer, as long after it as recorded"
    )
    if len(workload.drops):
        yield "--users: resets and evictions on request come at their recorded times"
