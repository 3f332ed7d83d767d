# SPDX-License-Identifier: Apache-2.0
"""What preemptions cost, and for whom room was made."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.preemptions import Preemption, Preemptions
from analysis.renderers.formats import seconds, share
from analysis.renderers.text.layout import Line, note, row, shortened

SHOWN = 5
_TAKERS = 3
_ID = 40


def lines(preemptions: Preemptions) -> Iterator[Line]:
    """The section; empty where nothing was preempted."""
    if not preemptions.count:
        return
    told = f"{preemptions.resumed:,} of them told: the request came back and has ended"
    yield from row("Preemptions", f"{preemptions.count:,}", told)
    if not preemptions.resumed:
        return
    tokens = (
        f"{preemptions.recomputed_tokens:,} of {preemptions.scheduled_tokens:,} computed tokens "
        "had been computed before"
    )
    yield from row("Recompute tax", share(preemptions.tax), tokens)
    yield from row("Time lost", seconds(preemptions.lost_sec), "in all, over the requests")
    if preemptions.by_itself:
        yield from row(
            "By themselves",
            f"{preemptions.by_itself:,}",
            "for blocks that the victim itself needed: its own did not suffice",
        )
        for livelock in preemptions.livelocks[:SHOWN]:
            if livelock.times > 1:
                yield from note(
                    f"{shortened(livelock.request_id, _ID)} preempted itself "
                    f"{livelock.times:,} times: admitted by its first tokens, it did not fit with "
                    "its next"
                )
    for preemption in preemptions.costliest[:SHOWN]:
        yield from note(_preemption(preemption))


def _preemption(preemption: Preemption) -> str:
    cost = (
        f"{shortened(preemption.request_id, _ID)}, preempted at "
        f"{seconds(preemption.preempted_sec)}, lost {seconds(preemption.lost_sec)} and computed "
        f"{preemption.recomputed_tokens:,} of {preemption.computed_tokens:,} tokens again"
    )
    if preemption.by_itself:
        cost += "; it needed the room itself"
    elif preemption.made_room_for:
        cost += f"; room was made for {shortened(preemption.made_room_for, _ID)}"
    takers = list(preemption.takers.items())
    if takers:
        named = [f"{shortened(name, _ID)} {blocks:,}" for name, blocks in takers[:_TAKERS]]
        left = len(takers) - _TAKERS
        more = f" and {left:,} more requests" if left > 0 else ""
        cost += f". Blocks of it were evicted for {', '.join(named)}{more}"
    return cost
