# SPDX-License-Identifier: Apache-2.0
"""Would other blocks, or a prefix cache at all, serve these prompts better?"""

from __future__ import annotations

from functools import partial

from analysis.judgement.advice.candidate import Aim, Candidate
from analysis.judgement.advice.thresholds import FEW, MUCH
from analysis.prefix.families import TooShort
from analysis.summary import Advice, Effect, Summary
from analysis.tables.facts import Facts
from analysis.wording.formats import share

SMALLEST = 16
SMALLEST_ON_CPUS = 32
"""vLLM's attention on CPUs takes multiples of this."""
"""Tokens of the smallest block that is advised."""


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
        confidence="medium",
    )


def block_size(summary: Summary) -> Advice | Candidate | None:
    """Prompts share beginnings that are shorter than a block."""
    families, facts = summary.families, summary.facts
    short = families.too_short
    if short is None or short.finding_unit is None or facts.prefix_caching is False:
        return None
    smallest = _smallest(facts)
    if short.finding_unit < smallest:
        return None
    found = short.found_tokens / families.prompt_tokens
    if found < MUCH and summary.misses.hit_tokens:
        return None
    write = partial(_small_blocks, short, found, len(facts.groups) == 1)
    if len(facts.groups) != 1:
        return write(short.finding_unit)
    measured = summary.prefix_cache.true.hit_tokens
    return Candidate(
        setting="block_size",
        value=short.finding_unit,
        aims=(Aim("hit_rate", measured, tokens=short.found_tokens),),
        write=write,
        sure="high",
        others=tuple(size for size in (64, 32, 16) if smallest <= size < short.finding_unit),
    )


def _smallest(facts: Facts) -> int:
    """Tokens of the smallest blocks that attention kernels of the session's device take."""
    return SMALLEST_ON_CPUS if facts.device == "cpu" else SMALLEST


def _small_blocks(short: TooShort, found: float, one_group: bool, value: int | None) -> Advice:
    named = one_group and value is not None
    return Advice(
        about="block size",
        says="Make blocks small enough for what the prompts share"
        + ("." if value is None else f": {value} tokens."),
        flag="--block-size" if named else None,
        value=f"{value}" if named else None,
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
        # Attention kernels for GPUs take no smaller blocks.
        if _smallest(facts) <= option.block_size < lost.actual.block_size
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
        known="modelled",
        effects=(Effect("empty_share", empty, best.at_end),),
    )
