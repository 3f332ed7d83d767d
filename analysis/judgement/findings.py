# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a session, whether or not a setting mends it?

Each rule looks at one part of the summary. Findings cost tokens, time or memory, which have no
common unit. So they are ranked by the share of the session's own that they cost: of the tokens of
the prompts, of the time of the requests, of the memory. What costs less than a hundredth is no
finding, but for what is a fault whatever it costs: a leak, a request that can never run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from analysis.judgement.advice.thresholds import COVERED, FEW, MUCH, ROOM_PCT, SOME
from analysis.pool.evictions import ON_PURPOSE
from analysis.summary import Finding, Summary
from analysis.wording import sections
from analysis.wording.formats import byte_size, counted, duration, seconds, share
from analysis.wording.waiting import WAITED_FOR


def find(summary: Summary) -> tuple[Finding, ...]:
    """All findings, the costliest first."""
    found = [finding for rules in _TOPICS.values() for rule in rules for finding in rule(summary)]
    return tuple(sorted(found, key=lambda finding: -(finding.share or 0.0)))


def fine(summary: Summary) -> tuple[str, ...]:
    """The topics without a finding, of those that the session shows anything about."""
    return tuple(
        topic
        for topic, rules in _TOPICS.items()
        if _KNOWN.get(topic, _is_served)(summary)
        and not any(finding for rule in rules for finding in rule(summary))
    )


def _leak(summary: Summary) -> Iterator[Finding]:
    holders, usage = summary.holders, summary.usage.combined
    if holders is None or not holders.leaked_blocks:
        return
    blocks, size = holders.leaked_blocks, summary.facts.bytes_per_block
    memory = None if size is None else blocks * size
    least = "at least " if holders.at_least else ""
    room = "" if memory is None else f" ({byte_size(memory)})"
    yield Finding(
        section=sections.HOLDERS,
        says=f"{least}{counted(blocks, 'block')}{room} leaked: no request holds them, and they are "
        "lost until vLLM starts again",
        share=None if usage is None else blocks / max(1, usage.end.total_blocks),
        bytes=memory,
    )


_LOST = {
    "capacity": "evicted because their room was needed",
    "reset": "dropped by resets of the prefix cache",
    "explicit": "evicted on request",
}
_NOT_FOUND = {
    "not yet cached": "another request was just computing them",
    "held back": "another KV cache group lacked them",
    "behind": "a block before them was missing",
    "other rank": "they were in another rank's cache",
    "speculation": "drafting computes the last block of a hit anew",
}


def _lost(*reasons: str) -> Callable[[Summary], Iterator[Finding]]:
    def rule(summary: Summary) -> Iterator[Finding]:
        for reason in reasons:
            found = _missed(summary, reason)
            if found is not None:
                tokens, part = found
                yield Finding(
                    section=sections.MISSES,
                    says=f"{tokens:,} prompt tokens ({share(part)}) were computed again: they had "
                    f"been {_LOST[reason]}{_in_turn(summary) if reason == 'capacity' else ''}",
                    share=part,
                    tokens=tokens,
                )

    return rule


def _missed(summary: Summary, reason: str) -> tuple[int, float] | None:
    """The tokens that were missed for this reason, and their share; None where they are few."""
    missed = summary.misses
    part = missed.by_reason.get(reason)
    if part is None or not part.tokens or part.tokens < SOME * missed.query_tokens:
        return None
    return part.tokens, part.tokens / missed.query_tokens


def _in_turn(summary: Summary) -> str:
    """Whether requests that take turns evict each other."""
    for known in summary.sharing.missed_rounds:
        if known.pool_blocks and known.peak_blocks > known.pool_blocks:
            return (
                f"; requests take turns and evict each other: between two uses up to "
                f"{known.peak_blocks:,} blocks are used, and the pool has {known.pool_blocks:,}"
            )
    return ""


def _not_found(summary: Summary) -> Iterator[Finding]:
    for reason, why in _NOT_FOUND.items():
        found = _missed(summary, reason)
        if found is not None:
            tokens, part = found
            yield Finding(
                section=sections.MISSES,
                says=f"{tokens:,} prompt tokens ({share(part)}) were not found, as {why}",
                share=part,
                tokens=tokens,
            )


def _too_short(summary: Summary) -> Iterator[Finding]:
    families, prompt = summary.families, summary.families.prompt_tokens
    short = families.too_short
    if families.unit_never_fills:
        yield Finding(
            section=sections.FAMILIES,
            says=f"no request can ever find anything: a hit is a multiple of {families.unit or 0:,}"
            " tokens, more than any request can have",
            share=families.shared_tokens / prompt if prompt else None,
            tokens=families.shared_tokens,
        )
    elif short is not None and short.found_tokens and short.found_tokens >= SOME * prompt:
        yield Finding(
            section=sections.FAMILIES,
            says=f"{short.requests:,} prompts share less than a block of {short.unit:,} tokens; "
            f"smaller blocks would have found {short.found_tokens:,} tokens",
            share=short.found_tokens / prompt,
            tokens=short.found_tokens,
        )
    shared = families.shared_tokens / prompt if prompt else 0.0
    if summary.facts.prefix_caching is False and shared >= MUCH:
        yield Finding(
            section=sections.FAMILIES,
            says=f"prefix caching is off, and {share(shared)} of the prompts' tokens are what an "
            "earlier prompt begins with",
            share=shared,
            tokens=families.shared_tokens,
        )


def _preempted(summary: Summary) -> Iterator[Finding]:
    preempted = summary.preemptions
    if not preempted.count:
        return
    itself = f", {preempted.by_itself:,} of them by themselves" if preempted.by_itself else ""
    put_off = preempted.parked.put_off_steps
    late = f"; {counted(put_off, 'step')} put running requests off" if put_off else ""
    cost = "what they cost is not known, as none of these requests came back and has ended"
    if preempted.recomputed_tokens is not None:
        cost = (
            f"{preempted.recomputed_tokens:,} tokens ({share(preempted.tax)}) were computed again, "
            f"and requests lost {seconds(preempted.lost_sec)}"
        )
    yield Finding(
        section=sections.PREEMPTIONS,
        says=f"{counted(preempted.count, 'preemption')}{itself}: {cost}{late}",
        share=preempted.tax,
        tokens=preempted.recomputed_tokens,
        seconds=preempted.lost_sec,
    )


def _never_run(summary: Summary) -> Iterator[Finding]:
    admission = summary.admission
    if admission.too_large:
        yield Finding(
            section=sections.REQUESTS,
            says=f"{counted(admission.too_large, 'request')} can never run: more blocks are needed "
            "than there are",
            share=admission.too_large / max(1, admission.looked_up),
        )
    if admission.circling:
        yield Finding(
            section=sections.REQUESTS,
            says=f"{counted(len(admission.circling), 'request')} can never run: even alone there "
            "is no room for the next chunk, and it preempts itself",
            share=len(admission.circling) / max(1, admission.looked_up),
        )


def _waited(summary: Summary) -> Iterator[Finding]:
    waiting, finish = summary.waiting, summary.scheduling.finish
    if not waiting.by_reason:
        return
    whole = (finish.mean_sec or 0.0) * finish.count
    # Requests that have not ended wait, too.
    part = min(1.0, waiting.request_sec / whole) if whole else 1.0
    if part < SOME:
        return
    reason, most = next(iter(waiting.by_reason.items()))
    yield Finding(
        section=sections.WAITING,
        says=f"requests waited for {duration(waiting.request_sec)} together, up to "
        f"{waiting.most:,} at once; {share(most.share)} of it for {WAITED_FOR[reason]}",
        share=part,
        seconds=waiting.request_sec,
    )
    blocked = [
        (name, reason)
        for name, reason in waiting.by_reason.items()
        if name in _HEAD_DOES_NOT_FIT
        and reason.usage_pct is not None
        and reason.usage_pct < ROOM_PCT
        and reason.share * part >= SOME
    ]
    if blocked:
        lost = sum(reason.request_sec for _, reason in blocked)
        free = 100 - sum(r.request_sec * (r.usage_pct or 0) for _, r in blocked) / lost
        yield Finding(
            section=sections.WAITING,
            says=f"head-of-line blocking: for {duration(lost)} of this the first in line did not "
            f"fit, while {free:.0f} % of the pool was not held",
            share=part * sum(reason.share for _, reason in blocked),
            seconds=lost,
        )


_HEAD_DOES_NOT_FIT = (
    "no_blocks",
    "whole_prompt",
    "watermark",
    "blocks",
    "no_chunking",
    "never_fits",
)


def _aborted(summary: Summary) -> Iterator[Finding]:
    requests, computed = summary.requests, summary.preemptions.scheduled_tokens
    wasted = requests.aborted_wasted_tokens
    if wasted and wasted >= SOME * computed:
        part = wasted / computed if computed else None
        yield Finding(
            section=sections.REQUESTS,
            says=f"{counted(requests.aborted, 'request')} aborted, after {wasted:,} tokens had "
            "been computed in vain",
            share=part,
            tokens=wasted,
        )


def _empty_slots(summary: Summary) -> Iterator[Finding]:
    empty = None if summary.fragmentation is None else summary.fragmentation.actual.share
    if empty is not None and empty >= MUCH:
        yield Finding(
            section=sections.USAGE,
            says=f"{share(empty)} of the slots in held blocks hold no token",
            share=empty,
        )


def _eager(summary: Summary) -> Iterator[Finding]:
    graphs = summary.cuda_graphs
    covered = graphs.execution_share
    if covered is not None and covered < COVERED and graphs.executions >= FEW:
        why = max(graphs.eager, key=lambda part: part.executions, default=None)
        half = "" if why is None else f", half of them with up to {why.p50_tokens:,} tokens"
        yield Finding(
            section=sections.GRAPHS,
            says=f"{share(1 - covered)} of executions ran in no CUDA graph{half}",
            share=1 - covered,
        )


def _padding(summary: Summary) -> Iterator[Finding]:
    padding = summary.cuda_graphs.padding
    if padding.share is not None and padding.share >= MUCH:
        yield Finding(
            section=sections.GRAPHS,
            says=f"{share(padding.share)} of what CUDA graphs computed was padding: "
            f"{padding.tokens:,} tokens",
            share=padding.share,
            tokens=padding.tokens,
        )


def _unused(summary: Summary) -> Iterator[Finding]:
    ledger, start = summary.graph_ledger, summary.memory.start_up
    never = None if ledger is None else ledger.unused.never
    if ledger is None or never is None or not never.graphs:
        return
    memory, total = never.memory_bytes, None if start is None else start.total_bytes
    taken = f" and {byte_size(memory)}" if memory else ""
    yield Finding(
        section=sections.LEDGER,
        says=f"{never.graphs:,} of {ledger.total.graphs:,} graphs were captured and never "
        f"replayed: {seconds(never.capture_sec)} of start-up{taken}",
        share=max(
            (memory or 0) / total if total else 0.0,
            never.capture_sec / max(summary.session.duration_sec, never.capture_sec, 1e-9),
        ),
        seconds=never.capture_sec,
        bytes=memory,
    )


def _recording(summary: Summary) -> Iterator[Finding]:
    hooks, whole = summary.cost.hook_sec, summary.session.duration_sec
    if hooks and whole and hooks >= SOME * whole:
        yield Finding(
            section=sections.PROFILING,
            says=f"recording took {seconds(hooks)} at the ends of steps, {share(hooks / whole)} of "
            "the time",
            share=hooks / whole,
            seconds=hooks,
        )
    if summary.memory.problem:
        yield Finding(
            section=sections.MEMORY,
            says=f"the GPU's memory was not sampled: {summary.memory.problem}",
            share=None,
        )


Rule = Callable[[Summary], Iterator[Finding]]

_TOPICS: dict[str, tuple[Rule, ...]] = {
    "leaks": (_leak,),
    "evictions": (_lost("capacity"),),
    "resets": (_lost("reset", "explicit"),),
    "preemptions": (_preempted,),
    "waiting": (_waited, _never_run),
    "CUDA graphs": (_eager, _padding, _unused),
    "recording": (_recording,),
    "other misses": (_not_found, _too_short),
    "aborts": (_aborted,),
    "empty slots": (_empty_slots,),
}
"""By the topic that is fine where none of its rules finds anything."""


def _is_served(summary: Summary) -> bool:
    return bool(summary.requests.ended)


_KNOWN: dict[str, Callable[[Summary], bool]] = {
    "leaks": lambda summary: summary.holders is not None,
    "evictions": lambda summary: bool(summary.misses.requests),
    "resets": lambda summary: any(reason in summary.evictions.by_reason for reason in ON_PURPOSE),
    "other misses": lambda summary: bool(summary.misses.requests),
    "empty slots": lambda summary: summary.fragmentation is not None,
    "CUDA graphs": lambda summary: bool(summary.cuda_graphs.executions),
    "recording": lambda summary: summary.cost.hook_sec is not None and not summary.warnings,
}
"""Whether the session shows anything about a topic; by default, whether requests ended."""
