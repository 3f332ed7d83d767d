# SPDX-License-Identifier: Apache-2.0
"""What ran: the session's facts out of metadata.json, and what it says went wrong.

Every fact may be missing, in an old session or one of a strange release, and is then None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.session import Session

FULL_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of groups in which every token of a request needs its place in a block."""


@dataclass(frozen=True)
class Group:
    """A KV cache group: ``kind`` is vLLM's name for how it caches, ``block_size`` in tokens,
    ``bytes_per_block`` on each GPU."""

    kind: str | None
    block_size: int | None
    bytes_per_block: int | None = None


@dataclass(frozen=True)
class Scheduler:
    """What the scheduler was told, by vLLM's names; None where a release has no such setting, or
    the session does not tell.

    ``max_num_active_seqs``: requests that may run. ``max_num_scheduled_tokens``: tokens that a
    step may schedule. ``scheduler_reserve_full_isl``: a request is admitted only when its whole
    prompt fits. ``watermark``: the share of the pool that an admission leaves free while others
    run. ``connector``: the KV connector's name. ``drops_hit_unit``: speculation computes the last
    block of every prefix hit anew. ``draft_slots``: slots of a step that each request takes for
    drafts; ``lookahead_tokens``: slots that it holds ahead of its tokens.
    """

    max_num_seqs: int | None
    max_num_active_seqs: int | None
    max_num_batched_tokens: int | None
    max_num_scheduled_tokens: int | None
    chunked_prefill: bool | None
    long_prefill_token_threshold: int | None
    scheduler_reserve_full_isl: bool | None
    watermark: float | None
    policy: str | None
    async_scheduling: bool | None
    max_loras: int | None
    connector: str | None
    speculative_method: str | None
    speculative_tokens: int | None
    drops_hit_unit: bool | None
    draft_slots: int | None
    lookahead_tokens: int | None


@dataclass(frozen=True)
class Facts:
    """The engine's configuration; with several engines, the first one's.

    ``engines``: the data-parallel ranks that recorded. ``pool_blocks`` counts the null block, as
    vLLM's own figure does. ``kv_tokens`` and ``max_concurrency`` are what vLLM prints at
    start-up, the latter for ``max_model_len`` tokens a request. ``settings``: the flags that
    advice may name, without their dashes, as far as the release has them.
    """

    model: str | None
    layers: int | None
    dtype: str | None
    bytes_per_token: int | None
    pool_blocks: int | None
    groups: tuple[Group, ...]
    kv_tokens: int | None
    max_model_len: int | None
    max_concurrency: float | None
    prefix_caching: bool | None
    gpu_memory_utilization: float | None
    tensor_parallel: int | None
    pipeline_parallel: int | None
    data_parallel: int | None
    cache_dtype: str | None
    scheduler: Scheduler
    settings: tuple[str, ...]
    engines: tuple[int, ...]
    host: str | None
    versions: Mapping[str, str]

    @property
    def bytes_per_block(self) -> int | None:
        """What a block of the pool takes on each GPU: it must do for every group."""
        return max(
            (group.bytes_per_block for group in self.groups if group.bytes_per_block), default=None
        )

    @property
    def full_attention_group(self) -> int:
        """The first group of full attention, which keeps every block; 0 if there is none."""
        kinds = [group.kind for group in self.groups]
        return next((index for index, kind in enumerate(kinds) if kind in FULL_ATTENTION), 0)


@dataclass(frozen=True)
class Cost:
    """What profiling itself took: time in the hooks that write, and bytes on disk."""

    hook_sec: float | None
    journal_bytes: int | None
    table_bytes: int | None
    collector_lag_sec: float | None


def read(session: Session) -> Facts:
    """The facts of the session."""
    metadata = session.metadata
    model, cache = _part(metadata, "model"), _part(metadata, "cache")
    parallel = _part(metadata, "parallel")
    return Facts(
        model=_text(model.get("name")),
        layers=_whole(model.get("layers")),
        dtype=_text(model.get("dtype")),
        bytes_per_token=_whole(model.get("bytes_per_token")),
        pool_blocks=_whole(cache.get("blocks")),
        groups=tuple(_groups(metadata, cache)),
        kv_tokens=_whole(cache.get("tokens")),
        max_model_len=_whole(cache.get("max_model_len")),
        max_concurrency=_number(cache.get("max_concurrency")),
        prefix_caching=_flag(cache.get("prefix_caching")),
        gpu_memory_utilization=_number(cache.get("gpu_memory_utilization")),
        tensor_parallel=_whole(parallel.get("tensor")),
        pipeline_parallel=_whole(parallel.get("pipeline")),
        data_parallel=_whole(parallel.get("data")),
        cache_dtype=_text(cache.get("cache_dtype")),
        scheduler=_scheduler(_part(metadata, "scheduler")),
        settings=_settings(metadata.get("settings")),
        engines=tuple(sorted(_engine_ranks(metadata))),
        host=_text(metadata.get("host")),
        versions={
            name: version
            for name, version in _part(metadata, "versions").items()
            if isinstance(version, str)
        },
    )


def cost(session: Session) -> Cost:
    """What profiling took, as far as the session says."""
    part = _part(session.metadata, "cost")
    return Cost(
        hook_sec=_number(part.get("hook_sec")),
        journal_bytes=_whole(part.get("journal_bytes")),
        table_bytes=_whole(part.get("table_bytes")),
        collector_lag_sec=_number(part.get("collector_lag_sec")),
    )


def warnings(session: Session) -> tuple[str, ...]:
    """What is missing from the session's data: one sentence each, the gravest first."""
    return tuple(_warnings(session.metadata))


def _warnings(metadata: Mapping[str, Any]) -> Iterator[str]:
    if not metadata:
        yield "metadata.json is missing: what ran is not known"
    dropped = _whole(metadata.get("dropped_events"))
    if dropped:
        yield f"{dropped:,} events were dropped: the disk was full or failed; figures are too low"
    rows = _whole(_part(metadata, "cost").get("rows_dropped"))
    if rows:
        yield f"{rows:,} rows were dropped: the disk was full or failed; figures are too low"
    for process in _processes(metadata):
        yield from _process_warnings(process)


def _process_warnings(process: Mapping[str, Any]) -> Iterator[str]:
    name = f"{process.get('role') or 'process'} {process.get('rank', '')}".strip()
    problem = process.get("problem")
    if problem:
        yield f"{name}: {problem}"
    mismatches = _whole(process.get("mismatches"))
    if mismatches:
        yield (
            f"{name}: in {mismatches:,} rows the blocks held are not those that vLLM counted; "
            "something moved blocks unseen"
        )
    for hook, reason in _part(process, "hooks_missing").items():
        yield f"{name}: hook {hook} is not attached: {reason}"
    for hook, reason in _part(process, "hooks_failed").items():
        yield f"{name}: {hook} failed ({reason}); what came after it is missing"


_ALWAYS = (
    "block-size",
    "enable-prefix-caching",
    "gpu-memory-utilization",
    "kv-cache-dtype",
    "max-model-len",
    "max-num-batched-tokens",
    "max-num-seqs",
)
"""Flags that every release has had; what an old session does not tell."""


def _settings(told: Any) -> tuple[str, ...]:
    if not isinstance(told, list):
        return _ALWAYS
    return tuple(name for name in told if isinstance(name, str))


def _scheduler(told: Mapping[str, Any]) -> Scheduler:
    seqs, tokens = _whole(told.get("max_num_seqs")), _whole(told.get("max_num_batched_tokens"))
    active = _whole(told.get("max_num_active_seqs"))
    scheduled = _whole(told.get("max_num_scheduled_tokens"))
    return Scheduler(
        max_num_seqs=seqs,
        max_num_active_seqs=seqs if active is None else active,
        max_num_batched_tokens=tokens,
        max_num_scheduled_tokens=tokens if scheduled is None else scheduled,
        chunked_prefill=_flag(told.get("chunked_prefill")),
        long_prefill_token_threshold=_whole(told.get("long_prefill_token_threshold")),
        scheduler_reserve_full_isl=_flag(told.get("scheduler_reserve_full_isl")),
        watermark=_number(told.get("watermark")),
        policy=_text(told.get("policy")),
        async_scheduling=_flag(told.get("async_scheduling")),
        max_loras=_whole(told.get("max_loras")),
        connector=_text(told.get("connector")),
        speculative_method=_text(told.get("speculative_method")),
        speculative_tokens=_whole(told.get("speculative_tokens")),
        drops_hit_unit=_flag(told.get("drops_hit_unit")),
        draft_slots=_whole(told.get("draft_slots")),
        lookahead_tokens=_whole(told.get("lookahead_tokens")),
    )


def _groups(metadata: Mapping[str, Any], cache: Mapping[str, Any]) -> Iterator[Group]:
    described = metadata.get("groups")
    if isinstance(described, Sequence) and not isinstance(described, str):
        for group in described:
            if isinstance(group, Mapping):
                yield Group(
                    _text(group.get("kind")),
                    _whole(group.get("block_size")) or None,
                    _whole(group.get("bytes_per_block")),
                )
        return
    sizes = cache.get("block_size")
    for size in sizes if isinstance(sizes, list) else [sizes]:
        if _whole(size):
            yield Group(None, _whole(size))


def _processes(metadata: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    processes = metadata.get("processes")
    if not isinstance(processes, list):
        return []
    return [process for process in processes if isinstance(process, Mapping)]


def _engine_ranks(metadata: Mapping[str, Any]) -> set[int]:
    ranks = (
        _whole(process.get("rank"))
        for process in _processes(metadata)
        if process.get("role") == "engine"
    )
    return {rank for rank in ranks if rank is not None}


def _part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = whole.get(name)
    return part if isinstance(part, Mapping) else {}


def _text(value: Any) -> str | None:
    """Text, or a list of which the first counts (a model may be served under several names)."""
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else None


_MOST = 10**12
"""No fact is a larger number; one that is, or a negative one, is damage."""


def _whole(value: Any) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and 0 <= value <= _MOST else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= _MOST else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None
