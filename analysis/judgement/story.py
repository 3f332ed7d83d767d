# SPDX-License-Identifier: Apache-2.0
"""What happened, in a few sentences? A report begins with them."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.summary import Summary
from analysis.wording.formats import byte_size, counted, duration, percent, seconds, share
from analysis.wording.waiting import WAITED_FOR

_NEARLY_ALL = 0.99

_WHY = {
    "compulsory": "was new",
    "capacity": "had been evicted",
    "reset": "had been lost to resets",
    "explicit": "had been evicted on request",
    "not yet cached": "was just being computed for another request",
    "held back": "was held back by another KV cache group",
    "behind": "lay behind a missing block",
    "other rank": "was in another rank's cache",
    "last token": "ended its prompt",
    "speculation": "is computed again for drafting",
    "unknown": "belongs to requests that have not ended",
}


def sentences(summary: Summary) -> Iterator[str]:
    """The story, sentence by sentence."""
    yield from _usage(summary)
    yield from _prefix_cache(summary)
    yield from _evictions(summary)
    yield from _preemptions(summary)
    yield from _requests(summary)
    yield from _graphs(summary)


def _usage(summary: Summary) -> Iterator[str]:
    usage = summary.usage.combined
    whole = summary.session.duration_sec - summary.session.begin_sec
    length = duration(whole)
    if usage is None or usage.bands is None:
        yield f"In {length}, no block of the KV cache was ever held."
        return
    one = len(summary.usage.pools) == 1
    pools = "the KV cache had" if one else "the engines' KV caches had"
    observed = summary.usage.observed_sec or 0.0
    # The time before does not count: start-up may take longer than all the rest.
    over = f"Over {length}"
    if observed < _NEARLY_ALL * whole:
        over = f"In the {duration(observed)} since the first request (of {length})"
    yield (
        f"{over}, {pools} {percent(usage.mean_pct)} of {'its' if one else 'their'} blocks "
        "in use on average, "
        f"{percent(usage.peak_pct)} at the peak, and over 90 % for {share(usage.bands.over_90)} of "
        "the time."
    )


def _prefix_cache(summary: Summary) -> Iterator[str]:
    true, missed = summary.prefix_cache.true, summary.misses
    if summary.facts.prefix_caching is False:
        yield "Prefix caching was off, so every prompt was computed in full."
        return
    if not true.query_tokens:
        return
    found = f"{share(true.token_rate)} of all prompt tokens came out of the prefix cache"
    if missed.ceiling is None or missed.unknown_requests == missed.requests:
        yield f"{found}."
        return
    reasons = [
        f"{share(part.tokens / missed.query_tokens)} {_WHY[reason]}"
        for reason, part in missed.by_reason.items()
        if part.tokens >= 0.01 * missed.query_tokens
    ]
    yield f"{found}, where at most {share(missed.ceiling)} could have." + (
        f" Of the prompt tokens, {', '.join(reasons)}." if reasons else ""
    )


def _evictions(summary: Summary) -> Iterator[str]:
    evicted, regret = summary.evictions.by_reason.get("reallocated"), summary.evictions.regretted
    half = summary.lifetimes.lifetime.p50_sec
    yield from _lost_on_purpose(summary)
    if evicted is None:
        yield "No cached block was evicted because its room was needed."
        return
    lived = "" if half is None else f", half of them within {seconds(half)} of being handed out"
    again = (
        f"{regret.blocks:,} of them were asked for again, and {regret.recomputed_tokens:,} tokens "
        "computed a second time"
        if regret.blocks
        else "none of them was asked for again"
    )
    yield f"{evicted.blocks:,} cached blocks were evicted{lived}; {again}."


def _lost_on_purpose(summary: Summary) -> Iterator[str]:
    evictions = summary.evictions
    for reason, did in (("reset", "Resets dropped"), ("explicit", "Requests to evict took")):
        blocks = evictions.by_reason.get(reason)
        lost = evictions.on_purpose.get(reason)
        if blocks is not None:
            again = (
                f"{lost.blocks:,} of them were asked for again, and {lost.recomputed_tokens:,} "
                "tokens computed a second time"
                if lost is not None
                else "none of them was asked for again"
            )
            yield f"{did} {blocks.blocks:,} cached blocks; {again}."


def _preemptions(summary: Summary) -> Iterator[str]:
    preempted = summary.preemptions
    if not preempted.count:
        return
    tax = "" if preempted.tax is None else f", {share(preempted.tax)} of all that was computed"
    again = "what that cost is not known"
    if preempted.recomputed_tokens is not None:
        again = f"{preempted.recomputed_tokens:,} tokens were computed again because of it{tax}"
    yield f"Running requests were preempted {counted(preempted.count, 'time')}, and {again}."


def _requests(summary: Summary) -> Iterator[str]:
    requests, admission, waiting = summary.requests, summary.admission, summary.waiting
    aborted = f" ({requests.aborted:,} of them aborted)" if requests.aborted else ""
    first = summary.scheduling.first_token.p50_sec
    soon = "" if first is None else f", half of them with their first token within {seconds(first)}"
    yield f"{counted(requests.ended, 'request')} ended{aborted}{soon}."
    if waiting.most and waiting.by_reason:
        reason, part = next(iter(waiting.by_reason.items()))
        yield (
            f"Up to {counted(waiting.most, 'request')} waited at once; {share(part.share)} of all "
            f"waiting was for {WAITED_FOR[reason]}."
        )
    if admission.too_large:
        yield (
            f"{admission.too_large:,} requests can never run: they need more blocks than there are."
        )


def _graphs(summary: Summary) -> Iterator[str]:
    graphs, ledger = summary.cuda_graphs, summary.graph_ledger
    if not graphs.executions:
        return
    padding = graphs.padding
    padded = f"; {share(padding.share)} of what these computed was padding" if padding.share else ""
    yield f"{share(graphs.execution_share)} of executions ran in a CUDA graph{padded}."
    if ledger is not None and ledger.unused.never.graphs:
        never = ledger.unused.never
        memory = "" if never.memory_bytes is None else f" and {byte_size(never.memory_bytes)}"
        yield (
            f"{never.graphs:,} of {ledger.total.graphs:,} graphs were captured and never replayed: "
            f"{seconds(never.capture_sec)} of start-up{memory}."
        )
