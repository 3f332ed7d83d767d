# SPDX-License-Identifier: Apache-2.0
"""Do requests wait for something that a setting gives?"""

from __future__ import annotations

from functools import partial

from analysis.judgement.advice.candidate import Aim, Candidate
from analysis.judgement.advice.thresholds import (
    MOST,
    MUCH,
    OVER_USED_PCT,
    ROOM_PCT,
    waited_for,
    waits,
)
from analysis.summary import Advice, Summary
from analysis.wording.formats import share


def more_requests_at_once(summary: Summary) -> Candidate | None:
    """Requests waited because as many ran as may, while the pool had room."""
    usage, most = summary.usage.combined, summary.facts.scheduler.max_num_seqs
    waited = waited_for(summary, "max_num_seqs")
    if usage is None or most is None or waited < MOST or not waits(summary):
        return None
    if summary.preemptions.count or usage.peak_pct >= ROOM_PCT:
        return None
    if (summary.misses.recomputed_share or 0.0) >= MUCH:
        # More requests at once would evict more of what is asked for again.
        return None
    factor = min(2.0, ROOM_PCT / max(usage.peak_pct, 1.0))
    value = max(most + 1, int(most * factor) // 8 * 8)
    return Candidate(
        setting="max_num_seqs",
        value=value,
        aims=(Aim("queue_mean_sec", summary.scheduling.queued.mean_sec),),
        write=partial(_more_requests, most, waited, usage.peak_pct),
        # How much longer a step takes with more requests than ever ran at once is not known.
        sure="medium",
    )


def _more_requests(most: int, waited: float, peak_pct: float, value: int | None) -> Advice:
    return Advice(
        about="requests at once",
        says="Let more requests run at once.",
        flag=None if value is None else "--max-num-seqs",
        value=None if value is None else f"{value}",
        evidence=(
            f"{share(waited)} of all waiting was for a place among {most:,} running requests",
            f"the pool was never fuller than {peak_pct:.1f} %",
        ),
        expect="Shorter queues; each token may take a little longer.",
        confidence="medium",
    )


def larger_steps(summary: Summary) -> Candidate | None:
    """Requests waited because each step had given all its tokens out."""
    usage, most = summary.usage.combined, summary.facts.scheduler.max_num_batched_tokens
    waited = waited_for(summary, "token_budget")
    if usage is None or most is None or waited < MOST or not waits(summary):
        return None
    if summary.preemptions.count or usage.peak_pct >= OVER_USED_PCT:
        return None
    return Candidate(
        setting="max_num_batched_tokens",
        value=2 * most,
        aims=(Aim("queue_mean_sec", summary.scheduling.queued.mean_sec),),
        write=partial(_larger_steps, most, waited, usage.peak_pct),
        # How much longer a step takes with more tokens than any had is not known.
        sure="medium",
        grain=64,
    )


def _larger_steps(most: int, waited: float, peak_pct: float, value: int | None) -> Advice:
    return Advice(
        about="step size",
        says="Let a step compute more tokens.",
        flag=None if value is None else "--max-num-batched-tokens",
        value=None if value is None else f"{value}",
        evidence=(
            f"{share(waited)} of all waiting was for tokens: a step computes {most:,} at most",
            f"the pool was never fuller than {peak_pct:.1f} %",
        ),
        expect=(
            "Prompts start earlier. Steps with long prompts take longer, which delays requests "
            "that are decoding, and activations take more memory."
        ),
        confidence="low",
    )


def more_adapters(summary: Summary) -> Advice | None:
    """Requests waited for their adapter."""
    most, waited = summary.facts.scheduler.max_loras, waited_for(summary, "lora")
    if most is None or waited < MOST or not waits(summary):
        return None
    return Advice(
        about="adapters",
        says="Let more LoRA adapters run at once.",
        flag="--max-loras",
        value=f"{2 * most}",
        evidence=(f"{share(waited)} of all waiting was for a place among {most:,} adapters",),
        expect="Shorter queues; each adapter takes memory from the KV cache.",
        confidence="medium",
    )


def whole_prompts(summary: Summary) -> Advice | None:
    """Prompts waited because vLLM does not cut them into chunks."""
    waited = waited_for(summary, "no_chunking")
    if waited < MOST or not waits(summary):
        return None
    return Advice(
        about="chunks",
        says="Let long prompts be computed in chunks.",
        flag="--enable-chunked-prefill",
        value="",
        evidence=(f"{share(waited)} of all waiting was for a step with room for a whole prompt",),
        expect="Prompts start with the tokens that are left in a step.",
        confidence="medium",
    )
