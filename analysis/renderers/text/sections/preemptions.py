# SPDX-License-Identifier: Apache-2.0
"""What preemptions cost, and for whom room was made."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.text.layout import Line, note, row
from analysis.requests.admission import Admission
from analysis.requests.preemptions import Parked, Preemption, Preemptions
from analysis.wording.formats import counted, seconds, share
from analysis.wording.printable import shortened

SHOWN = 5
_TAKERS = 3
_ID = 40


def lines(preemptions: Preemptions, admission: Admission) -> Iterator[Line]:
    """The section; empty where nothing was preempted. Requests that preempt themselves while alone
    are named among the requests that can never run."""
    if not preemptions.count:
        return
    billed = f"{preemptions.resumed:,} of them in this bill: the request came back and has ended"
    yield from row("Preemptions", f"{preemptions.count:,}", billed)
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
            "the preempted request itself needed the blocks: its own were not enough",
        )
        alone = {(request.engine, request.request_id) for request in admission.circling}
        for livelock in preemptions.livelocks[:SHOWN]:
            if livelock.times > 1 and (livelock.engine, livelock.request_id) not in alone:
                yield from note(
                    f"{shortened(livelock.request_id, _ID)} preempted itself "
                    f"{livelock.times:,} times: its first tokens fit when it was admitted, "
                    "its next ones did not"
                )
    yield from _parked(preemptions.parked)
    for preemption in preemptions.costliest[:SHOWN]:
        yield from note(_preemption(preemption))


def _parked(parked: Parked) -> Iterator[Line]:
    if parked.blocks:
        yield from row(
            "Parked",
            counted(parked.blocks, "block"),
            f"of {counted(parked.preemptions, 'preemption')} came free only later, up to "
            f"{counted(parked.most_steps, 'step')} or {seconds(parked.longest_sec)}: a step in "
            "flight could still write to them, so preempting made no room at once",
        )
    if parked.put_off_steps:
        yield from row(
            "Put off",
            counted(parked.put_off_steps, "step"),
            f"({seconds(parked.put_off_sec)}) found no free block, and no request to preempt whose "
            "blocks were not in flight: running requests got no tokens",
        )


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
        largest = [f"{shortened(name, _ID)} {blocks:,}" for name, blocks in takers[:_TAKERS]]
        left = len(takers) - _TAKERS
        more = f" and {left:,} more requests" if left > 0 else ""
        cost += f". Some of its blocks were evicted for {', '.join(largest)}{more}"
    return cost
