# SPDX-License-Identifier: Apache-2.0
"""Is the pool too small for this load, or larger than it needs?"""

from __future__ import annotations

import math

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
from analysis.summary import Advice, Summary
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
        confidence="high",
    )


def more_blocks(summary: Summary) -> Advice | None:
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
    evidence = []
    if lost >= MUCH:
        evidence.append(
            f"{missed.recomputed_tokens:,} prompt tokens were computed again after their blocks "
            f"had been evicted: {share(missed.recomputed_share)} of all prefill"
        )
    if tax >= SOME:
        evidence.append(
            f"{counted(preempted.count, 'preemption')}; {share(tax)} of all tokens were computed a "
            "second time because of them"
        )
    if crowded:
        evidence.append(
            f"usage was over {OVER_USED_PCT:.0f} % for {share(over)} of the time, and "
            f"{share(short_of_blocks)} of all waiting was for blocks"
        )
    half = summary.lifetimes.lifetime.p50_sec
    if half is not None and half < SHORT_LIFETIME_SEC:
        evidence.append(f"half of the evicted blocks lived for less than {seconds(half)}")
    pool = _blocks(summary)
    more = _blocks_wanted(summary, lost >= MUCH)
    flag, value = _flag(summary, pool, more)
    return Advice(
        about="pool",
        says=_larger_pool(pool, more, summary),
        flag=flag,
        value=value,
        evidence=tuple(evidence),
        expect=_of_a_larger_pool(summary, more, lost, tax),
        confidence="high" if 4 * more <= pool else "medium" if more <= pool else "low",
    )


def _blocks_wanted(summary: Summary, for_contents: bool) -> int:
    """Blocks that would have kept nine in ten of the missed blocks, at most; a tenth of the pool
    where running requests need them."""
    wanted = summary.misses.short.more_blocks_p90 if for_contents else None
    return max(1, wanted or math.ceil(_blocks(summary) / 10))


def _blocks(summary: Summary) -> int:
    """Blocks that requests can hold in the largest pool."""
    return max((usage.end.total_blocks for usage in summary.usage.pools), default=0)


def _larger_pool(pool: int, more: int, summary: Summary) -> str:
    size = summary.facts.bytes_per_block
    where = "" if summary.facts.device == "cpu" else " on each GPU"
    room = "" if size is None else f", {byte_size(more * size)} more{where}"
    whose = "each engine's" if len(summary.facts.engines) > 1 else "the"
    pools = sorted(set(blocks_by_engine(summary.usage).values())) or [pool]
    each = f"{pools[0]:,}" if len(pools) == 1 else f"{pools[0]:,} to {pools[-1]:,}"
    return f"Give {whose} KV cache {more:,} blocks more than its {each}{room}."


def _flag(summary: Summary, pool: int, more: int) -> tuple[str | None, str | None]:
    """The flag that makes room for so many blocks more, and its value."""
    facts = summary.facts
    size = facts.bytes_per_block
    if facts.blocks_override is not None:
        # vLLM makes exactly so many, whatever the memory.
        return "--num-gpu-blocks-override", f"{pool + 1 + more}"
    if _is_for_host_memory(summary, pool, more):
        if size is None:
            return None, None
        return "--kv-offloading-size", f"{math.ceil(more * size / 2**30)}"
    if size is not None and "kv-cache-memory-bytes" in facts.settings:
        return "--kv-cache-memory-bytes", f"{(pool + 1 + more) * size}"
    if (facts.gpu_memory_utilization or LARGEST_UTILIZATION) < LARGEST_UTILIZATION:
        return "--gpu-memory-utilization", f"{LARGEST_UTILIZATION}"
    return None, None


def _is_for_host_memory(summary: Summary, pool: int, more: int) -> bool:
    """Whether the host should keep so many blocks more, and not the GPU."""
    facts = summary.facts
    if facts.device == "cpu" or facts.blocks_override is not None:
        return False
    size = facts.bytes_per_block
    return more > pool and (size is None or more * size >= _FOR_HOST_MEMORY_BYTES)


def _of_a_larger_pool(summary: Summary, more: int, lost: float, tax: float) -> str:
    missed, facts, pool = summary.misses, summary.facts, _blocks(summary)
    parts = []
    if lost >= MUCH:
        parts.append(
            f"Nine in ten of these {missed.recomputed_tokens:,} tokens would have been found; the "
            f"hit rate cannot rise above {share(missed.ceiling)}, whatever the pool."
        )
    elif tax >= SOME:
        parts.append("Fewer preemptions, and less work done twice.")
    else:
        parts.append("Shorter queues.")
    if _is_for_host_memory(summary, pool, more):
        parts.append(
            f"The pool would be {1 + more / pool:.1f} times as large: keep the additional blocks "
            "in host memory, or send requests that share a prefix to the same engine."
        )
    if facts.cache_dtype is not None and "fp8" not in facts.cache_dtype and more > pool // 4:
        parts.append("--kv-cache-dtype fp8 gives twice as many blocks as 16 bits.")
    if len(facts.groups) == 1:
        command = f"profilemate whatif SESSION --blocks {pool + 1 + more}"
        parts.append(f"'{command}' simulates this load with that pool.")
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
