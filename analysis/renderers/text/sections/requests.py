# SPDX-License-Identifier: Apache-2.0
"""How the requests fared."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.text.layout import Line, note, row
from analysis.requests.admission import Admission
from analysis.requests.fan_out import FanOut
from analysis.requests.requests import Requests
from analysis.summary import Summary
from analysis.wording.formats import counted, share, with_details
from analysis.wording.printable import abridged


def lines(summary: Summary) -> Iterator[Line]:
    requests, preemptions = summary.requests, summary.preemptions
    yield from row("Ended", _ended(requests))
    if requests.ended:
        tokens = f"{requests.input_tokens:,} in, {requests.output_tokens:,} out"
        yield from row("Tokens", tokens)
    if requests.draft_tokens:
        of_all = f"of {requests.draft_tokens:,} tokens that speculation proposed"
        accepted = f"{requests.accepted_tokens:,} ({share(requests.acceptance)})"
        yield from row("Drafts accepted", accepted, of_all)
    yield from _fan_out(summary.by_whom.fan_out)
    steps = f"in {preemptions.steps:,} steps"
    if requests.preempted:
        steps += (
            f"; they hit {requests.preempted:,} of the ended requests, "
            f"one of them {counted(requests.most_preemptions, 'time')}"
        )
    yield from row("Preemptions", f"{preemptions.count:,}", steps)
    if requests.aborted:
        wasted = f"{requests.aborted_wasted_tokens:,} tokens had been computed for them in vain"
        yield from row("Aborted", f"{requests.aborted:,}", wasted)
    yield from _admission(summary.admission)


def _ended(requests: Requests) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in requests.by_reason.items())
    return with_details(f"{requests.ended:,}", [reasons])


def _fan_out(fan_out: FanOut) -> Iterator[Line]:
    if fan_out.calls:
        of_each = f"of {fan_out.requests:,} requests, at most {fan_out.most:,} of one"
        yield from row("Several answers", counted(fan_out.calls, "call"), of_each)
    if fan_out.beam_calls:
        of_each = f"of {fan_out.beam_requests:,} requests"
        yield from row("Beam search", counted(fan_out.beam_calls, "call"), of_each)


def _admission(admission: Admission) -> Iterator[Line]:
    for circling in admission.circling:
        yield from row(
            "Preempts itself",
            f"{circling.times:,} times",
            f"{abridged(circling.request_id)} has no room for its next chunk even alone: it can "
            "never run",
        )
    if admission.never_admitted:
        of_all = f"of {admission.looked_up:,} that were looked up"
        yield from row("Never admitted", f"{admission.never_admitted:,}", of_all)
    if not admission.too_large:
        return
    yield from row("Can never run", f"{admission.too_large:,}")
    for request in admission.largest:
        yield from note(
            f"{abridged(request.request_id)} needs {request.needed_blocks:,} blocks for "
            f"{request.tokens:,} tokens, {request.usable_blocks:,} are usable"
        )
    left = admission.too_large - len(admission.largest)
    if left:
        yield from note(f"and {left:,} more")
