# SPDX-License-Identifier: Apache-2.0
"""Is the pool too small for this load, or larger than it needs?"""

from __future__ import annotations

import math
from functools import partial

from analysis.judgement.advice.candidate import Aim, Candidate
from analysis.judgement.advice.thresholds import (
    FEW,
    LARGEST_UTILIZATION,
    MOST,
    MUCH,
    OVER_USED_PCT,
    SHORT_LIFETIME_SEC,
    SOME,
    UNDER_USED_PCT,
    waited_for,
    waits,
)
from analysis.pool.usage import blocks_by_engine
from analysis.summary import Advice, Effect, Summary
from analysis.wording.formats import byte_size, counted, seconds, share
from analysis.wording.printable import abridged

_FOR_HOST_MEMORY_BYTES = 2**30
"""Less memory is easier to find on the GPU than to offload to the host."""


def can_never_run(summary: Summary) -> Advice | None:
    """Requests that need more blocks than there are wait for ever and block the queue."""
    admission, facts = summary.admission, summary.facts
    if not admission.too_large or not admission.largest or len(facts.groups) != 1:
        return None
    largest = admission.largest[0]
    size = facts.groups[0].block_size or 1
    limit = largest.usable_blocks * size
    return Advice(
        about="length",
        says="Refuse requests that cannot fit, instead of letting them block the queue.",
        flag="--max-model-len",
        value=f"{limit}",
        evidence=(
            (
                f"{admission.too_large:,} requests need more blocks than the pool has; "
                f"{abridged(largest.request_id)} needs {largest.needed_blocks:,} where "
                f"{largest.usable_blocks:,} are usable, and was looked up {largest.lookups:,} times"
            ),
        ),
        expect=(
            f"Longer ones are refused at once. To serve them, the pool needs "
            f"{largest.needed_blocks + 1:,} blocks."
        ),
        confidence="high",
        known="modelled",
        effects=(Effect("can_never_run", admission.too_large, 0),),
    )


def preempts_itself(summary: Summary) -> Advice | None:
    """A prompt is admitted for its first chunk and preempted by its second, again and again."""
    admission, scheduler = summary.admission, summary.facts.scheduler
    if not admission.self_preempted or scheduler.scheduler_reserve_full_isl is not False:
        return None
    return Advice(
        about="admission",
        says="Admit a request only when its whole prompt has room.",
        flag="--scheduler-reserve-full-isl",
        value="",
        evidence=(f"{admission.self_preempted:,} requests were preempted by their own next chunk",),
        expect="They wait in the queue instead of being computed in vain.",
        confidence="medium",
    )


def more_blocks(summary: Summary) -> Candidate | None:
    """The pool is too small: needed contents were evicted, or requests were preempted."""
    missed, preempted = summary.misses, summary.preemptions
    lost = missed.recomputed_tokens / missed.query_tokens if missed.query_tokens else 0.0
    tax = preempted.tax or 0.0
    short_of_blocks = waited_for(summary, "no_blocks", "whole_prompt", "watermark", "blocks")
    usage = summary.usage.combined
    over = usage.bands.over_90 if usage is not None and usage.bands is not None else 0.0
    crowded = over >= MUCH and short_of_blocks >= MOST and waits(summary)
    if usage is None or (lost < MUCH and tax < SOME and not crowded):
        return None
    evidence, aims = [], []
    if lost >= MUCH:
        found = summary.prefix_cache.true.hit_tokens
        aims.append(Aim("hit_rate", found, tokens=missed.recomputed_tokens))
        evidence.append(
            f"{missed.recomputed_tokens:,} prompt tokens were computed again after their blocks "
            f"had been evicted: {share(missed.recomputed_share)} of all prefill"
        )
    if tax >= SOME:
        aims.append(Aim("preemptions", preempted.count))
        evidence.append(
            f"{counted(preempted.count, 'preemption')}; {share(tax)} of all tokens were computed a "
            "second time because of them"
        )
    if crowded:
        aims.append(Aim("queue_mean_sec", summary.scheduling.queued.mean_sec))
        evidence.append(
            f"usage was over {OVER_USED_PCT:.0f} % for {share(over)} of the time, and "
            f"{share(short_of_blocks)} of all waiting was for blocks"
        )
    half = summary.lifetimes.lifetime.p50_sec
    if half is not None and half < SHORT_LIFETIME_SEC:
        evidence.append(f"half of the evicted blocks lived for less than {seconds(half)}")
    pool = _blocks(summary)
    more = _blocks_wanted(summary, lost >= MUCH)
    return Candidate(
        setting="num_blocks",
        value=pool + more,
        aims=tuple(aims),
        write=partial(_written, summary, tuple(evidence), lost, tax),
        sure="high",
        without=True,
    )


def _written(
    summary: Summary, evidence: tuple[str, ...], lost: float, tax: float, value: int | None
) -> Advice:
    """The advice to have so many usable blocks; or more of them, however many."""
    pool = _blocks(summary)
    more = None if value is None else value - pool
    only_contents = lost >= MUCH and tax < SOME
    of_contents = lost >= MUCH and more is not None and more <= pool
    flag, setting = None, None
    if more is not None:
        flag, setting = _flag(summary, pool, more, only_contents=only_contents)
    return Advice(
        about="pool",
        says=_larger_pool(pool, more, summary),
        flag=flag,
        value=setting,
        evidence=evidence,
        expect=_of_a_larger_pool(summary, more, lost, tax),
        # How many blocks end preemptions and queues, nothing but a replay can say.
        confidence="medium" if of_contents else "low",
    )


def _blocks_wanted(summary: Summary, for_contents: bool) -> int:
    """Blocks that would have kept nine in ten of the missed blocks, at most; a tenth of the pool
    where running requests need them."""
    wanted = summary.misses.short.more_blocks_p90 if for_contents else None
    return max(1, wanted or math.ceil(_blocks(summary) / 10))


def _blocks(summary: Summary) -> int:
    """Blocks that requests can hold in the largest pool."""
    return max((usage.end.total_blocks for usage in summary.usage.pools), default=0)


def _larger_pool(pool: int, more: int | None, summary: Summary) -> str:
    whose = "each engine's" if len(summary.facts.engines) > 1 else "the"
    pools = sorted(set(blocks_by_engine(summary.usage).values())) or [pool]
    each = f"{pools[0]:,}" if len(pools) == 1 else f"{pools[0]:,} to {pools[-1]:,}"
    if more is None:
        return f"Give {whose} KV cache more blocks than its {each}."
    size = summary.facts.bytes_per_block
    where = "" if summary.facts.device == "cpu" else " on each GPU"
    room = "" if size is None else f", {byte_size(more * size)} more{where}"
    return f"Give {whose} KV cache {more:,} blocks more than its {each}{room}."


def _flag(
    summary: Summary, pool: int, more: int, *, only_contents: bool
) -> tuple[str | None, str | None]:
    """The flag that makes room for so many blocks more, and its value."""
    facts = summary.facts
    size = facts.bytes_per_block
    if facts.blocks_override is not None:
        # vLLM makes exactly so many, whatever the memory.
        return "--num-gpu-blocks-override", f"{pool + 1 + more}"
    if only_contents and _is_for_host_memory(summary, pool, more):
        if size is None:
            return None, None
        return "--kv-offloading-size", f"{math.ceil(more * size / 2**30)}"
    if size is not None and "kv-cache-memory-bytes" in facts.settings:
        return "--kv-cache-memory-bytes", f"{(pool + 1 + more) * size}"
    if (facts.gpu_memory_utilization or LARGEST_UTILIZATION) < LARGEST_UTILIZATION:
        return "--gpu-memory-utilization", f"{LARGEST_UTILIZATION}"
    return None, None


def _is_for_host_memory(summary: Summary, pool: int, more: int) -> bool:
    """Whether the host should keep so many blocks more, and not the GPU. It can do that only for
    contents: what runs needs its blocks on the GPU."""
    facts = summary.facts
    if facts.device == "cpu" or facts.blocks_override is not None:
        return False
    size = facts.bytes_per_block
    return more > pool and (size is None or more * size >= _FOR_HOST_MEMORY_BYTES)


def _of_a_larger_pool(summary: Summary, more: int | None, lost: float, tax: float) -> str:
    missed, facts, pool = summary.misses, summary.facts, _blocks(summary)
    parts = []
    if lost >= MUCH:
        found = "Nine in ten" if more is not None else "More"
        parts.append(
            f"{found} of these {missed.recomputed_tokens:,} tokens would have been found; the "
            f"hit rate cannot rise above {share(missed.ceiling)}, whatever the pool."
        )
    elif tax >= SOME:
        parts.append("Fewer preemptions, and less work done twice.")
    else:
        parts.append("Shorter queues.")
    only_contents = lost >= MUCH and tax < SOME
    if more is not None and only_contents and _is_for_host_memory(summary, pool, more):
        parts.append(
            f"The pool would be {1 + more / pool:.1f} times as large: keep the additional blocks "
            "in host memory, or send requests that share a prefix to the same engine."
        )
    is_much = more is None or more > pool // 4
    if facts.cache_dtype is not None and "fp8" not in facts.cache_dtype and is_much:
        parts.append("--kv-cache-dtype fp8 gives twice as many blocks as 16 bits.")
    if tax >= SOME and is_much:
        parts.append("A smaller --max-num-seqs means fewer preemptions, too, and longer queues.")
    if len(facts.groups) == 1:
        blocks = "2x" if more is None else f"{pool + 1 + more}"
        parts.append(f"'profilemate whatif SESSION --blocks {blocks}' simulates such a pool.")
    return " ".join(parts)


def larger_than_needed(summary: Summary) -> Advice | None:
    """The load never filled the pool."""
    usage, evicted = summary.usage.combined, summary.evictions
    if usage is None or usage.peak_pct >= UNDER_USED_PCT or summary.requests.ended < FEW:
        return None
    if evicted.total.blocks or summary.preemptions.count or waits(summary):
        return None
    used = usage.end.total_blocks - usage.end.free_blocks
    if used * 100 >= UNDER_USED_PCT * usage.end.total_blocks:
        return None
    return Advice(
        about="pool",
        says="The KV cache is larger than this load needs; its memory could serve another use.",
        flag=None,
        value=None,
        evidence=(
            (
                f"at most {usage.peak_pct:.1f} % of {usage.end.total_blocks:,} blocks were held at "
                "a time, and no cached block was ever evicted"
            ),
            f"at the end {used:,} blocks were held or cached",
        ),
        expect="Nothing gets faster; more or longer requests fit, or a smaller GPU is enough.",
        confidence="medium",
    )
