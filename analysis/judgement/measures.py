# SPDX-License-Identifier: Apache-2.0
"""By which figures can sessions be compared and checked, and which way is better?

The measures are one flat, ordered catalogue. A measure has a direction only where, for the same
requests on the same model, more or less of it is better whatever else changes. So usage has none:
a full pool is well used until requests wait. Rates over time and lifetimes have none either: an
engine that is twice as fast evicts twice as many blocks a second, and they live half as long.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from analysis.errors import RuleError
from analysis.pool.usage import Bands, PoolUsage
from analysis.requests.askers import EVERY
from analysis.requests.by_whom import Share
from analysis.requests.scheduling import PerStep, Scheduling
from analysis.stats.spread import Spread
from analysis.summary import Summary

Better = Literal["higher", "lower"]

_NO_ROOM = ("no_blocks", "whole_prompt", "watermark", "blocks")
"""Reasons of ``analysis.requests.waiting`` for which more blocks would have admitted a request."""


@dataclass(frozen=True)
class Measure:
    """A named figure of a session.

    ``unit``: ``share`` (from 0 to 1), ``%`` (from 0 to 100), ``s`` (seconds), or what is counted.
    ``says``: what the figure is, in a sentence. ``better``: which way is better, None where
    neither is. ``read``: takes it from a summary.
    """

    name: str
    unit: str
    says: str
    better: Better | None
    read: Callable[[Summary], float | None]

    def of(self, found: Summary) -> float | None:
        """The figure; None where the session has none, or one that is not finite."""
        value = self.read(found)
        return value if value is None or math.isfinite(value) else None


def _usage(read: Callable[[PoolUsage], float | None]) -> Callable[[Summary], float | None]:
    """A figure of all pools together."""
    return lambda found: None if found.usage.combined is None else read(found.usage.combined)


def _time_in(read: Callable[[Bands], float]) -> Callable[[Summary], float | None]:
    return _usage(lambda usage: None if usage.bands is None else read(usage.bands))


def _queued(read: Callable[[Spread], float | None]) -> Callable[[Summary], float | None]:
    return lambda found: read(found.scheduling.queued)


def _first_token(read: Callable[[Spread], float | None]) -> Callable[[Summary], float | None]:
    return lambda found: read(found.scheduling.first_token)


def _finish(read: Callable[[Spread], float | None]) -> Callable[[Summary], float | None]:
    return lambda found: read(found.scheduling.finish)


def _lifetime(read: Callable[[Spread], float | None]) -> Callable[[Summary], float | None]:
    return lambda found: read(found.lifetimes.lifetime)


def _idle(read: Callable[[Spread], float | None]) -> Callable[[Summary], float | None]:
    return lambda found: read(found.lifetimes.idle)


def _step(read: Callable[[Scheduling], PerStep | None]) -> Callable[[Summary], float | None]:
    """The mean of a figure of every step."""

    def mean(found: Summary) -> float | None:
        counted = read(found.scheduling)
        return None if counted is None else counted.mean

    return mean


def _waiting_for_blocks(found: Summary) -> float:
    reasons = found.waiting.by_reason
    return sum(reasons[name].request_sec for name in _NO_ROOM if name in reasons)


def _empty_slots(found: Summary) -> float | None:
    return None if found.fragmentation is None else found.fragmentation.actual.at_end


def _leaked_blocks(found: Summary) -> float | None:
    return None if found.holders is None else found.holders.leaked_blocks


def _observed_sec(found: Summary) -> float:
    return found.session.duration_sec - found.session.begin_sec


def _graphs_unused(found: Summary) -> float | None:
    return None if found.graph_ledger is None else found.graph_ledger.unused.never.graphs


def _gpu_step_p50(found: Summary, phase: str) -> float | None:
    steps = (each.step.p50_sec for each in found.gpu_time.by_phase if each.phase == phase)
    return next(steps, None)


def _lost(reason: str) -> Callable[[Summary], float]:
    def tokens(found: Summary) -> float:
        missed = found.misses.by_reason.get(reason)
        return 0 if missed is None else missed.tokens

    return tokens


def _evictions_reused(found: Summary) -> float:
    return found.evictions.total.blocks - found.evictions.total.never_reused


_PREFIX_CACHE = (
    Measure(
        "hit_rate",
        "share",
        "Prompt tokens found in the prefix cache, of all prompt tokens of admitted requests.",
        "higher",
        lambda found: found.prefix_cache.true.token_rate,
    ),
    Measure(
        "request_hit_rate",
        "share",
        "Admitted requests that found any of their prompt in the prefix cache.",
        "higher",
        lambda found: found.prefix_cache.true.request_rate,
    ),
    Measure(
        "vllm_hit_rate",
        "share",
        "The hit rate as vLLM's own counters have it, by the rule of its release.",
        None,
        lambda found: found.prefix_cache.vllm.token_rate,
    ),
    Measure(
        "hit_rate_ceiling",
        "share",
        "The hit rate that these requests could have reached with a pool of any size.",
        None,
        lambda found: found.misses.ceiling,
    ),
    Measure(
        "hit_tokens",
        "tokens",
        "Prompt tokens found in the prefix cache.",
        None,
        lambda found: found.prefix_cache.true.hit_tokens,
    ),
    Measure(
        "recomputed_tokens",
        "tokens",
        "Prompt tokens computed again because they had been evicted for room.",
        "lower",
        lambda found: found.misses.recomputed_tokens,
    ),
    Measure(
        "recomputed_share",
        "share",
        "These, of all prompt tokens that had to be computed.",
        "lower",
        lambda found: found.misses.recomputed_share,
    ),
    Measure(
        "reset_tokens",
        "tokens",
        "Prompt tokens computed again because a reset had dropped them.",
        "lower",
        _lost("reset"),
    ),
    Measure(
        "explicit_tokens",
        "tokens",
        "Prompt tokens computed again because they had been evicted on request.",
        "lower",
        _lost("explicit"),
    ),
)
_LATENCY = (
    Measure(
        "queue_p50",
        "s",
        "From arrival to admission: median.",
        "lower",
        _queued(lambda spread: spread.p50_sec),
    ),
    Measure(
        "queue_p95",
        "s",
        "From arrival to admission: 95th percentile.",
        "lower",
        _queued(lambda spread: spread.p95_sec),
    ),
    Measure(
        "queue_p99",
        "s",
        "From arrival to admission: 99th percentile.",
        "lower",
        _queued(lambda spread: spread.p99_sec),
    ),
    Measure(
        "first_token_p50",
        "s",
        "From arrival to the first token, as the engine saw it: median.",
        "lower",
        _first_token(lambda spread: spread.p50_sec),
    ),
    Measure(
        "first_token_p95",
        "s",
        "From arrival to the first token: 95th percentile.",
        "lower",
        _first_token(lambda spread: spread.p95_sec),
    ),
    Measure(
        "first_token_p99",
        "s",
        "From arrival to the first token: 99th percentile.",
        "lower",
        _first_token(lambda spread: spread.p99_sec),
    ),
    Measure(
        "finish_p50",
        "s",
        "From arrival to the end: median.",
        "lower",
        _finish(lambda spread: spread.p50_sec),
    ),
    Measure(
        "finish_p95",
        "s",
        "From arrival to the end: 95th percentile.",
        "lower",
        _finish(lambda spread: spread.p95_sec),
    ),
    Measure(
        "waiting",
        "request-s",
        "Waiting requests, times the seconds for which they waited.",
        "lower",
        lambda found: found.waiting.request_sec,
    ),
    Measure(
        "waiting_most",
        "requests",
        "The most requests that waited at once in an engine.",
        "lower",
        lambda found: found.waiting.most,
    ),
    Measure(
        "waiting_for_blocks",
        "request-s",
        "Of this, waiting while the pool had no blocks for the next request.",
        "lower",
        _waiting_for_blocks,
    ),
)
_STEPS = (
    Measure(
        "steps",
        "steps",
        "Steps of the scheduler that scheduled tokens.",
        None,
        lambda found: found.scheduling.steps,
    ),
    Measure(
        "step_requests_mean",
        "requests",
        "Requests in a step: mean.",
        None,
        _step(lambda scheduling: scheduling.requests),
    ),
    Measure(
        "step_tokens_mean",
        "tokens",
        "Tokens in a step: mean.",
        None,
        _step(lambda scheduling: scheduling.tokens),
    ),
)
_PREEMPTIONS = (
    Measure(
        "preemptions",
        "times",
        "How often a running request was preempted to make room.",
        "lower",
        lambda found: found.preemptions.count,
    ),
    Measure(
        "preempted_requests",
        "requests",
        "Requests that ended and had been preempted.",
        "lower",
        lambda found: found.requests.preempted,
    ),
    Measure(
        "most_preemptions",
        "times",
        "Preemptions of the request that was preempted most often.",
        "lower",
        lambda found: found.requests.most_preemptions,
    ),
    Measure(
        "preemption_tokens",
        "tokens",
        "Tokens computed again because of preemptions.",
        "lower",
        lambda found: found.preemptions.recomputed_tokens,
    ),
    Measure(
        "preemption_tax",
        "share",
        "These, of all tokens that were computed.",
        "lower",
        lambda found: found.preemptions.tax,
    ),
    Measure(
        "preemption_lost",
        "s",
        "From a preemption until the request had its blocks again: sum over all preemptions.",
        "lower",
        lambda found: found.preemptions.lost_sec,
    ),
)
_USAGE = (
    Measure(
        "usage_mean",
        "%",
        "Usage: blocks held by requests, of all blocks; mean over time.",
        None,
        _usage(lambda usage: usage.mean_pct),
    ),
    Measure(
        "usage_while_held",
        "%",
        "Mean usage over the time in which any block was held.",
        None,
        _usage(lambda usage: usage.mean_while_held_pct),
    ),
    Measure(
        "usage_p50",
        "%",
        "Usage was at or below this for half of the time.",
        None,
        _usage(lambda usage: usage.p50_pct),
    ),
    Measure(
        "usage_p95",
        "%",
        "Usage was at or below this for 95 % of the time.",
        None,
        _usage(lambda usage: usage.p95_pct),
    ),
    Measure("usage_peak", "%", "The highest usage.", None, _usage(lambda usage: usage.peak_pct)),
    Measure(
        "usage_under_40",
        "share",
        "The time with usage under 40 %.",
        None,
        _time_in(lambda bands: bands.under_40),
    ),
    Measure(
        "usage_over_90",
        "share",
        "The time with usage over 90 %.",
        None,
        _time_in(lambda bands: bands.over_90),
    ),
    Measure(
        "empty_slots",
        "share",
        "Slots of held blocks without a token, at the ends of the requests.",
        "lower",
        _empty_slots,
    ),
    Measure(
        "leaked_blocks",
        "blocks",
        "Blocks held at the end, though the requests that got them have ended.",
        "lower",
        _leaked_blocks,
    ),
)
_EVICTIONS = (
    Measure(
        "evictions",
        "blocks",
        "Cached blocks that lost their content.",
        "lower",
        lambda found: found.evictions.total.blocks,
    ),
    Measure(
        "evictions_reused",
        "blocks",
        "Of these, blocks that a request had found in the prefix cache before.",
        "lower",
        _evictions_reused,
    ),
    Measure(
        "evictions_regretted",
        "blocks",
        "Of these, blocks evicted for room whose content was asked for again.",
        "lower",
        lambda found: found.evictions.regretted.blocks,
    ),
    Measure(
        "evictions_per_sec",
        "blocks/s",
        "Evictions a second, over the whole session.",
        None,
        lambda found: found.evictions.rate.mean_per_sec,
    ),
    Measure(
        "evictions_peak",
        "blocks/s",
        "Evictions in the second with the most.",
        None,
        lambda found: found.evictions.rate.peak_per_sec,
    ),
    Measure(
        "lifetime_mean",
        "s",
        "Allocation to eviction of the blocks evicted for room: mean.",
        None,
        _lifetime(lambda spread: spread.mean_sec),
    ),
    Measure(
        "lifetime_p50",
        "s",
        "Allocation to eviction: median.",
        None,
        _lifetime(lambda spread: spread.p50_sec),
    ),
    Measure(
        "lifetime_p95",
        "s",
        "Allocation to eviction: 95th percentile.",
        None,
        _lifetime(lambda spread: spread.p95_sec),
    ),
    Measure(
        "idle_p50",
        "s",
        "Last use to eviction of the blocks evicted for room: median.",
        None,
        _idle(lambda spread: spread.p50_sec),
    ),
    Measure(
        "idle_p95",
        "s",
        "Last use to eviction: 95th percentile.",
        None,
        _idle(lambda spread: spread.p95_sec),
    ),
    Measure(
        "blocks_allocated",
        "blocks",
        "Blocks that were allocated.",
        None,
        lambda found: found.allocations.allocated.blocks,
    ),
    Measure(
        "blocks_reused",
        "blocks",
        "Blocks that requests found in the prefix cache and reused.",
        None,
        lambda found: found.allocations.reused.blocks,
    ),
    Measure(
        "resets",
        "times",
        "How often the prefix cache was dropped.",
        None,
        lambda found: found.allocations.resets,
    ),
)
_REQUESTS = (
    Measure(
        "requests", "requests", "Requests that ended.", None, lambda found: found.requests.ended
    ),
    Measure(
        "input_tokens",
        "tokens",
        "Prompt tokens of the requests that ended.",
        None,
        lambda found: found.requests.input_tokens,
    ),
    Measure(
        "output_tokens",
        "tokens",
        "Generated tokens of the requests that ended.",
        None,
        lambda found: found.requests.output_tokens,
    ),
    Measure(
        "draft_acceptance",
        "share",
        "Tokens that speculation proposed and that were accepted, of all that it proposed.",
        "higher",
        lambda found: found.requests.acceptance,
    ),
    Measure(
        "aborted",
        "requests",
        "Requests that were aborted.",
        "lower",
        lambda found: found.requests.aborted,
    ),
    Measure(
        "aborted_tokens",
        "tokens",
        "Tokens computed for requests that were aborted.",
        "lower",
        lambda found: found.requests.aborted_computed_tokens,
    ),
    Measure(
        "never_admitted",
        "requests",
        "Requests that were looked up and never admitted.",
        "lower",
        lambda found: found.admission.never_admitted,
    ),
    Measure(
        "too_large",
        "requests",
        "Requests that can never run: they need more blocks than the pool has.",
        "lower",
        lambda found: found.admission.too_large,
    ),
    Measure("duration", "s", "From the end of the warm-up to the last event.", None, _observed_sec),
)
_GPU = (
    Measure(
        "graph_coverage",
        "share",
        "Executions that ran in a CUDA graph, dummy ones left out.",
        "higher",
        lambda found: found.cuda_graphs.execution_share,
    ),
    Measure(
        "graphed_tokens",
        "share",
        "Tokens that were computed in a CUDA graph, without padding, of all tokens.",
        "higher",
        lambda found: found.cuda_graphs.token_share,
    ),
    Measure(
        "graph_padding",
        "share",
        "Padding, of all tokens that CUDA graphs computed.",
        None,
        lambda found: found.cuda_graphs.padding.share,
    ),
    Measure(
        "graphs_unused",
        "graphs",
        "CUDA graphs that were captured and never replayed.",
        "lower",
        _graphs_unused,
    ),
    Measure(
        "graph_memory",
        "bytes",
        "GPU memory that capturing CUDA graphs took, on the worker where it took most.",
        None,
        lambda found: None if found.graph_ledger is None else found.graph_ledger.total.memory_bytes,
    ),
    Measure(
        "gpu_memory_peak",
        "bytes",
        "The most memory in use on a GPU, of all processes.",
        None,
        lambda found: max((gpu.peak_used_bytes for gpu in found.memory.gpus), default=None),
    ),
)
_GPU_TIME = (
    Measure(
        "gpu_decode_step_p50",
        "s",
        "Time of a step of answers alone on the GPU, by `VLLM_PROFILING_PHASES=1`: median.",
        None,
        lambda found: _gpu_step_p50(found, "decode"),
    ),
    Measure(
        "gpu_mixed_step_p50",
        "s",
        "The same of a step with prompts and answers.",
        None,
        lambda found: _gpu_step_p50(found, "mixed"),
    ),
    Measure(
        "gpu_encoder_share",
        "share",
        "GPU time of a multimodal model's encoder, of that of all steps.",
        None,
        lambda found: None if found.gpu_time.encoder is None else found.gpu_time.encoder.share,
    ),
)
_EXPERTS = (
    Measure(
        "expert_imbalance",
        "times",
        "Tokens of the busiest expert of a layer, divided by the mean of its experts; the mean of "
        "all layers.",
        None,
        lambda found: found.experts.mean_max_over_mean,
    ),
    Measure(
        "expert_gini",
        "share",
        "The Gini coefficient of the tokens of a layer's experts; the mean of all layers.",
        None,
        lambda found: found.experts.mean_gini,
    ),
    Measure(
        "experts_unused",
        "share",
        "Experts that got no token, of the experts of all layers.",
        None,
        lambda found: found.experts.unused_share,
    ),
    Measure(
        "expert_balancedness",
        "share",
        "The mean load of expert-parallel ranks divided by that of the busiest, as vLLM's load "
        "balancer computes it.",
        None,
        lambda found: found.experts.balancedness,
    ),
)
CATALOGUE: tuple[Measure, ...] = (
    *_PREFIX_CACHE,
    *_LATENCY,
    *_STEPS,
    *_PREEMPTIONS,
    *_USAGE,
    *_EVICTIONS,
    *_REQUESTS,
    *_GPU,
    *_GPU_TIME,
    *_EXPERTS,
)

_BY_NAME = {measure.name: measure for measure in CATALOGUE}

_OF_KEY: Mapping[str, Callable[[Share], float | None]] = {
    "hit_rate": lambda share: share.hit_rate,
    "hit_tokens": lambda share: share.hit_tokens,
    "recomputed_tokens": lambda share: share.missed_by_reason.get("capacity", 0),
    "reset_tokens": lambda share: share.missed_by_reason.get("reset", 0),
    "explicit_tokens": lambda share: share.missed_by_reason.get("explicit", 0),
    "queue_p50": lambda share: share.queued_p50_sec,
    "queue_p95": lambda share: share.queued_p95_sec,
    "first_token_p50": lambda share: share.first_token_p50_sec,
    "first_token_p95": lambda share: share.first_token_p95_sec,
    "preemptions": lambda share: share.preempted,
    "evictions": lambda share: share.evicted_blocks,
    "requests": lambda share: share.ended,
    "output_tokens": lambda share: share.output_tokens,
    "draft_acceptance": lambda share: (
        share.accepted_tokens / share.draft_tokens if share.draft_tokens else None
    ),
}
"""The measures that there are of one key, too."""
OF_KEY = tuple(_OF_KEY)

_KEY = re.compile(r"(\w+)\{([a-z-]+)=([^{}]*)\}")


def by_name(name: str) -> Measure:
    """The measure with this name. ``hit_rate{lora=x}`` is that of one key alone, and
    ``hit_rate{lora=}`` that of the requests without one.

    Raises:
        RuleError: there is none. Its text suggests names that are alike.

    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    if (of_key := _KEY.fullmatch(name)) is not None:
        return _of_key(name, *of_key.groups())
    near = difflib.get_close_matches(name, _BY_NAME, n=3, cutoff=0.5)
    perhaps = f"; perhaps {' or '.join(near)}" if near else ""
    raise RuleError(
        f"there is no measure {name!r}{perhaps}; 'profilemate check --list' lists them all"
    )


def _of_key(name: str, of_all: str, by: str, key: str) -> Measure:
    measure = by_name(of_all)
    if of_all not in _OF_KEY:
        raise RuleError(f"{name!r}: there is no {of_all} of one key; there is {', '.join(OF_KEY)}")
    if by not in EVERY:
        raise RuleError(f"{name!r}: {by!r} is no kind of key; write one of {', '.join(EVERY)}")

    def read(found: Summary) -> float | None:
        split = found.by_whom.split(by)
        shares = () if split is None else split.shares
        share = next((share for share in shares if share.key == (key or None)), None)
        return None if share is None else _OF_KEY[of_all](share)

    whose = f"{by} {key}" if key else f"requests without {by}"
    return replace(measure, name=name, says=f"Of {whose}. {measure.says}", read=read)


def of_keys(found: Sequence[Summary]) -> Iterator[Measure]:
    """Measures of the keys that these sessions may have in common: not of salts, which have other
    numbers in each session."""
    splits = [split for split in found[0].by_whom.splits if split.by != "salt" and split.keys > 1]
    for split in splits:
        for share in split.shares[:COMPARED]:
            # A client may choose a name that no rule could name.
            if _KEY.fullmatch(f"x{{{split.by}={share.key or ''}}}"):
                for name in ("hit_rate", "recomputed_tokens", "queue_p95", "first_token_p95"):
                    yield by_name(f"{name}{{{split.by}={share.key or ''}}}")


COMPARED = 5
"""So many keys of each kind are compared."""


def of(found: Summary) -> Mapping[str, float | None]:
    """Every measure of the session by its name, in the catalogue's order, in its ``unit``."""
    return {measure.name: measure.of(found) for measure in CATALOGUE}
