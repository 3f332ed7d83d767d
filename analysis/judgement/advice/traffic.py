# SPDX-License-Identifier: Apache-2.0
"""What no flag can change: where requests go, when they arrive, and how they begin."""

from __future__ import annotations

from analysis.judgement.advice.thresholds import FEW, MOST, MUCH
from analysis.summary import Advice, Summary
from analysis.wording.formats import counted, share
from analysis.wording.printable import abridged


def same_engine(summary: Summary) -> Advice | None:
    """Another rank's cache had what lookups missed."""
    missed = summary.misses
    elsewhere = missed.by_reason.get("other rank")
    if elsewhere is None or elsewhere.tokens < MUCH * missed.query_tokens:
        return None
    return Advice(
        about="routing",
        says="Send requests that share a prefix to the same data-parallel rank.",
        flag=None,
        value=None,
        evidence=(
            (
                f"{elsewhere.tokens:,} prompt tokens of {elsewhere.requests:,} requests were in "
                f"another rank's cache: {share(elsewhere.tokens / missed.query_tokens)} of all"
            ),
        ),
        expect=(
            "Requests find these tokens. It takes a router that follows prefixes or conversations; "
            "vLLM's own balancing looks at queues alone."
        ),
        confidence="medium",
    )


def one_first(summary: Summary) -> Advice | None:
    """Requests with the same beginning came while the first of them was being computed."""
    missed = summary.misses
    early = missed.by_reason.get("not yet cached")
    if early is None or early.tokens < MUCH * missed.query_tokens:
        return None
    return Advice(
        about="arrival",
        says="Send one request of each shared prefix first, and the others after its first token.",
        flag=None,
        value=None,
        evidence=(
            (
                f"another request was just computing {early.tokens:,} prompt tokens of "
                f"{counted(early.requests, 'request')}"
            ),
        ),
        expect=f"Up to {share(early.tokens / missed.query_tokens)} of the prompts' tokens found.",
        confidence="medium",
    )


def what_varies_last(summary: Summary) -> Advice | None:
    """A family of prompts parts early, each its own way."""
    families, missed = summary.families, summary.misses
    new = missed.by_reason.get("compulsory")
    if new is None or new.tokens < MOST * missed.query_tokens:
        return None
    for family in families.largest:
        enough = family.requests >= max(FEW, MUCH * families.requests)
        if (
            enough
            and family.shared_tokens >= 32
            and family.continuations * 10 >= 9 * family.requests
        ):
            return Advice(
                about="prompts",
                says="If prompts differ early in a date, an id or a name, move that to their end.",
                flag=None,
                value=None,
                evidence=(
                    (
                        f"{family.requests:,} prompts share their first {family.shared_tokens:,} "
                        f"tokens and part before token {family.part_before:,}, in "
                        f"{family.continuations:,} ways (for example {abridged(family.example)})"
                    ),
                ),
                expect=(
                    f"Requests find what is the same in the {family.tokens_after:,} tokens after "
                    "it. No flag does that."
                ),
                confidence="low",
            )
    return None


def sweepers(summary: Summary) -> Advice | None:
    """One-off prompts evict what others would have found."""
    swept, missed = summary.blame.sweepers, summary.misses
    if missed.recomputed_tokens < MUCH * missed.query_tokens or (swept.share or 0.0) < MOST:
        return None
    return Advice(
        about="traffic",
        says="Serve one-off prompts on an engine of their own.",
        flag=None,
        value=None,
        evidence=(
            (
                f"{counted(swept.requests, 'request')}, whose own blocks nobody asked for again, "
                f"evicted {counted(swept.regretted_blocks, 'block')} that others needed: "
                f"{share(swept.share)} of the recomputed tokens"
            ),
        ),
        expect=(
            f"Up to {swept.recomputed_tokens:,} tokens are not computed again. vLLM's cache keeps "
            "what was used last and has no flag for another policy."
        ),
        confidence="low",
    )
