# SPDX-License-Identifier: Apache-2.0
"""Would other blocks, or a prefix cache at all, serve these prompts better?"""

from __future__ import annotations

from analysis.judgement.advice.thresholds import FEW, MUCH
from analysis.summary import Advice, Summary
from analysis.wording.formats import share


def prefix_caching(summary: Summary) -> Advice | None:
    """Prefix caching was off, and prompts begin alike."""
    families = summary.families
    if summary.facts.prefix_caching is not False or families.sharing < 2:
        return None
    shared = families.shared_tokens / families.prompt_tokens
    if shared < MUCH:
        return None
    return Advice(
        about="prefix caching",
        says="Turn prefix caching on.",
        flag="--enable-prefix-caching",
        value="",
        evidence=(
            (
                f"{families.sharing:,} of {families.requests:,} prompts begin as an earlier one: "
                f"{share(shared)} of all prompt tokens"
            ),
        ),
        expect=f"Up to {share(shared)} of prefill is saved, as far as the pool keeps it.",
        confidence="high",
    )


def block_size(summary: Summary) -> Advice | None:
    """Prompts share beginnings that are shorter than a block."""
    families, facts = summary.families, summary.facts
    short = families.too_short
    if short is None or short.finding_unit is None or facts.prefix_caching is False:
        return None
    found = short.found_tokens / families.prompt_tokens
    if found < MUCH and summary.misses.hit_tokens:
        return None
    one_group = len(facts.groups) == 1
    return Advice(
        about="block size",
        says=f"Make blocks small enough for what the prompts share: {short.finding_unit} tokens.",
        flag="--block-size" if one_group else None,
        value=f"{short.finding_unit}" if one_group else None,
        evidence=(
            (
                f"{short.requests:,} prompts share up to {short.longest_tokens:,} tokens with an "
                f"earlier one, and a hit is a multiple of {short.unit:,}: none of it can be found"
            ),
        ),
        expect=(
            f"About {short.found_tokens:,} prompt tokens ({share(found)}) would be found."
            + ("" if one_group else " Models with several KV cache groups set their own block.")
        ),
        confidence="medium",
    )


def fragmentation(summary: Summary) -> Advice | None:
    """Many slots of held blocks have no token, because blocks are large."""
    facts, lost = summary.facts, summary.fragmentation
    empty = lost.actual.at_end if lost is not None else None
    if lost is None or empty is None or lost.requests < FEW or len(facts.groups) != 1:
        return None
    smaller = [
        option
        for option in lost.by_block_size
        if option.block_size < lost.actual.block_size
        and option.at_end is not None
        and empty - option.at_end >= MUCH
    ]
    if not smaller:
        return None
    best = max(smaller, key=lambda option: option.block_size)
    return Advice(
        about="block size",
        says=f"Smaller blocks waste less: {best.block_size} tokens.",
        flag="--block-size",
        value=f"{best.block_size}",
        evidence=(
            (
                f"{share(empty)} of the slots that requests held at their end had no token, with "
                f"blocks of {lost.actual.block_size:,}"
            ),
        ),
        expect=f"{share(best.at_end)} with blocks of {best.block_size}: room for more requests.",
        confidence="medium",
    )
