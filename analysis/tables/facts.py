# SPDX-License-Identifier: Apache-2.0
"""What ran, and what went wrong: the facts and warnings in a session's metadata.json.

A fact is None where it is missing, as in an old session or in one of an unusual release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.tables.faults import shown
from analysis.tables.metadata import flag, is_newer, number, part, parts, text, whole
from analysis.tables.schema import FORMAT_VERSION, MOST_TOKENS
from analysis.tables.session import Session

FULL_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of KV cache groups in which every token of a request takes a slot of a block."""


@dataclass(frozen=True)
class Group:
    """A KV cache group. ``kind``: vLLM's name for its way to cache. ``block_size``: in tokens.
    ``bytes_per_block``: on each GPU. ``pool``: the number of its block pool.

    The others are by vLLM's names, None where the kind has no such, or where it was not recorded.
    ``layer_kind``: the kind of its layers, where ``kind`` only says that they have several sizes.
    ``sliding_window`` and ``attention_chunk_size``: in tokens.
    """

    kind: str | None
    block_size: int | None
    bytes_per_block: int | None = None
    pool: int = 0
    layer_kind: str | None = None
    is_eagle_group: bool = False
    prefix_cacheable: bool = True
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    extra_retained_tokens: int | None = None
    mamba_cache_mode: str | None = None
    num_speculative_blocks: int | None = None
    num_prefill_checkpoint_blocks: int | None = None
    prefill_checkpoint_alignment: int | None = None


@dataclass(frozen=True)
class Offloading:
    """How vLLM's offloading connector keeps blocks in host memory; None where it was not recorded.

    ``spec``: the name of what keeps them. ``host_bytes``: of each engine. ``chunk_blocks``: blocks
    that are kept and found together. ``prompts_only``: answers are not kept. ``policy``: of
    eviction. ``store_threshold``: a chunk is kept when it is asked to be for the so manyth time.
    """

    spec: str | None
    host_bytes: int | None
    chunk_blocks: int | None
    prompts_only: bool | None
    policy: str | None
    store_threshold: int | None


@dataclass(frozen=True)
class Scheduler:
    """The scheduler's settings, by vLLM's names; None where a release has no such setting, or where
    it was not recorded.

    ``max_num_active_seqs``: requests that may run. ``max_num_scheduled_tokens``: tokens that a
    step may schedule. ``scheduler_reserve_full_isl``: a request is admitted only when its whole
    prompt fits. ``watermark``: the share of the pool that an admission leaves free while other
    requests run. ``connector``: the name of the KV connector. ``offloading``: None unless it is
    vLLM's for host memory. ``drops_hit_unit``: speculation
    computes the last block of every prefix hit anew. ``draft_slots``: tokens of a step that each
    request takes for drafts. ``lookahead_tokens``: slots that it holds ahead of its tokens.
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
    offloading: Offloading | None
    speculative_method: str | None
    speculative_tokens: int | None
    drops_hit_unit: bool | None
    draft_slots: int | None
    lookahead_tokens: int | None


@dataclass(frozen=True)
class Retention:
    """Which blocks of sliding windows and states stay cached. ``interval``: one in so many tokens;
    0: what a prompt's end needs; None: all. ``shares_checkpoints``: also where the prompts of
    several requests part (``enable_mamba_shared_prefix_checkpoint``)."""

    interval: int | None
    shares_checkpoints: bool


@dataclass(frozen=True)
class Facts:
    """The engine's configuration; of the first engine where there are several.

    ``bytes_per_token``: of KV cache, on one worker. ``pool_blocks``: the null block included, as in
    vLLM's own figure. ``kv_tokens`` and ``max_concurrency``: what vLLM prints at start-up, the
    latter for requests of ``max_model_len`` tokens. ``blocks_override``: the value of
    ``--num-gpu-blocks-override``. ``settings``: flags that the release has and that advice may
    name, without their dashes. ``retention``: None where it was not recorded. ``device``: ``cuda``,
    ``cpu`` or another of vLLM's words.
    ``engines``: the data-parallel ranks that recorded.
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
    blocks_override: int | None
    prefix_caching: bool | None
    gpu_memory_utilization: float | None
    tensor_parallel: int | None
    pipeline_parallel: int | None
    data_parallel: int | None
    cache_dtype: str | None
    scheduler: Scheduler
    settings: tuple[str, ...]
    retention: Retention | None
    device: str | None
    engines: tuple[int, ...]
    host: str | None
    versions: Mapping[str, str]

    @property
    def bytes_per_block(self) -> int | None:
        """Bytes that a block of the pool takes on each GPU: a block must fit every group."""
        return max(
            (group.bytes_per_block for group in self.groups if group.bytes_per_block), default=None
        )

    @property
    def batches(self) -> int:
        """Steps in flight at once: as many as there are stages, and two where they are scheduled
        asynchronously."""
        return max(self.pipeline_parallel or 1, 2 if self.scheduler.async_scheduling else 1)

    @property
    def full_attention_group(self) -> int:
        """The number of the first group of full attention; 0 if there is none."""
        kinds = [group.kind for group in self.groups]
        return next((index for index, kind in enumerate(kinds) if kind in FULL_ATTENTION), 0)


@dataclass(frozen=True)
class Cost:
    """What profiling itself cost, None where it was not recorded.

    ``hook_sec``: time in the hooks at the ends of steps. ``writing_sec``: processor time of the
    thread that writes. ``journal_bytes`` and ``table_bytes``: on disk. ``collector_lag_sec``: the
    longest time from an event to its row in a table.
    """

    hook_sec: float | None
    writing_sec: float | None
    journal_bytes: int | None
    table_bytes: int | None
    collector_lag_sec: float | None


COUNTS: Mapping[str, int] = {
    "model.layers": 10_000,
    "model.kv_heads": 100_000,
    "model.head_size": 1_000_000,
    "model.bytes_per_token": 2**40,
    "cache.blocks": 10**9,
    "cache.tokens": 10**12,
    "cache.max_model_len": MOST_TOKENS,
    "cache.num_gpu_blocks_override": 10**9,
    "parallel.tensor": 100_000,
    "parallel.pipeline": 10_000,
    "parallel.data": 1_000_000,
    "scheduler.max_num_seqs": 1_000_000,
    "scheduler.max_num_active_seqs": 1_000_000,
    "scheduler.max_num_batched_tokens": MOST_TOKENS,
    "scheduler.max_num_scheduled_tokens": MOST_TOKENS,
    "scheduler.long_prefill_token_threshold": MOST_TOKENS,
    "scheduler.max_loras": 1_000_000,
    "scheduler.offloading.host_bytes": 2**60,
    "scheduler.offloading.chunk_blocks": MOST_TOKENS,
    "scheduler.offloading.store_threshold": 10**9,
    "scheduler.speculative_tokens": 10_000,
    "scheduler.draft_slots": 10_000,
    "scheduler.lookahead_tokens": 1_000_000,
}
"""Whole numbers in metadata.json, and the largest of each that makes sense. The analyzer computes
with them, and some are how often it does so."""


def count(metadata: Mapping[str, Any], name: str) -> int | None:
    """One of the ``COUNTS``; None where it is missing, or makes no sense."""
    value = whole(_entry(metadata, name))
    return None if value is None or value > COUNTS[name] else value


def _entry(metadata: Mapping[str, Any], name: str) -> Any:
    *sections, key = name.split(".")
    for section in sections:
        metadata = part(metadata, section)
    return metadata.get(key)


def read(session: Session) -> Facts:
    """The facts of the session."""
    metadata = session.metadata
    model, cache = part(metadata, "model"), part(metadata, "cache")
    return Facts(
        model=text(model.get("name")),
        layers=count(metadata, "model.layers"),
        dtype=text(model.get("dtype")),
        bytes_per_token=count(metadata, "model.bytes_per_token"),
        pool_blocks=count(metadata, "cache.blocks"),
        groups=tuple(_groups(metadata, cache)),
        kv_tokens=count(metadata, "cache.tokens"),
        max_model_len=count(metadata, "cache.max_model_len"),
        max_concurrency=number(cache.get("max_concurrency")),
        blocks_override=count(metadata, "cache.num_gpu_blocks_override"),
        prefix_caching=flag(cache.get("prefix_caching")),
        gpu_memory_utilization=number(cache.get("gpu_memory_utilization")),
        tensor_parallel=count(metadata, "parallel.tensor"),
        pipeline_parallel=count(metadata, "parallel.pipeline"),
        data_parallel=count(metadata, "parallel.data"),
        cache_dtype=text(cache.get("cache_dtype")),
        scheduler=_scheduler(metadata),
        settings=_settings(metadata.get("settings")),
        retention=_retention(cache),
        device=text(metadata.get("device")),
        engines=tuple(sorted(_engine_ranks(metadata))),
        host=text(metadata.get("host")),
        versions={
            name: version
            for name, version in part(metadata, "versions").items()
            if isinstance(version, str)
        },
    )


def cost(session: Session) -> Cost:
    """What profiling the session cost."""
    entry = part(session.metadata, "cost")
    return Cost(
        hook_sec=number(entry.get("hook_sec")),
        writing_sec=number(entry.get("writing_sec")),
        journal_bytes=whole(entry.get("journal_bytes")),
        table_bytes=whole(entry.get("table_bytes")),
        collector_lag_sec=number(entry.get("collector_lag_sec")),
    )


def warnings(session: Session) -> tuple[str, ...]:
    """What is missing from the session's data, one sentence each, the gravest first."""
    return tuple(_warnings(session.metadata))


def _warnings(metadata: Mapping[str, Any]) -> Iterator[str]:
    if not metadata:
        yield "metadata.json is missing: what ran is not known"
    if is_newer(metadata):
        yield (
            f"metadata.json: format_version is {metadata['format_version']}, and this analyzer "
            f"reads {FORMAT_VERSION}: what the newer format changed, it does not know"
        )
    yield from _senseless(metadata)
    dropped = whole(metadata.get("dropped_events"))
    if dropped:
        yield (
            f"{dropped:,} events were dropped: the journal could not be written, or nobody read "
            "it; figures are too low"
        )
    rows = whole(part(metadata, "cost").get("rows_dropped"))
    if rows:
        yield f"{rows:,} rows were dropped: the disk was full or failed; figures are too low"
    for process in parts(metadata, "processes"):
        yield from _process_warnings(process)


def _senseless(metadata: Mapping[str, Any]) -> Iterator[str]:
    """What cannot be what was recorded."""
    for name, most in COUNTS.items():
        value = _entry(metadata, name)
        if value is not None and count(metadata, name) is None:
            yield (
                f"metadata.json: {name} is {shown(str(value))}, and no number from 0 to {most:,}: "
                "it counts as not known"
            )
    for place, group in enumerate(parts(metadata, "groups")):
        value = group.get("block_size")
        if value is not None and _block_size(value) is None:
            yield (
                f"metadata.json: block_size of group {place} is {shown(str(value))}, and no "
                f"number from 1 to {MOST_TOKENS:,}: it counts as not known"
            )


def _process_warnings(process: Mapping[str, Any]) -> Iterator[str]:
    name = f"{process.get('role') or 'process'} {process.get('rank', '')}".strip()
    problem = process.get("problem")
    if problem:
        yield f"{name}: {problem}"
    mismatches = whole(process.get("mismatches"))
    if mismatches:
        yield (
            f"{name}: in {mismatches:,} rows the blocks held are not those that vLLM counted; "
            "something moved blocks unseen"
        )
    for hook, reason in part(process, "hooks_missing").items():
        yield f"{name}: hook {hook} is not attached: {reason}"
    for hook, reason in part(process, "hooks_failed").items():
        yield f"{name}: {hook} failed ({reason}); what came after it is missing"
    for lost in part(process, "lost"):
        what = part(part(process, "lost"), lost)
        yield f"{name}: not recorded to the end: {what.get('tables')} ({what.get('reason')})"


_ALWAYS = (
    "block-size",
    "enable-prefix-caching",
    "gpu-memory-utilization",
    "kv-cache-dtype",
    "max-model-len",
    "max-num-batched-tokens",
    "max-num-seqs",
)
"""Flags that every release has had, for old sessions that do not list theirs."""


def _settings(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list):
        return _ALWAYS
    return tuple(name for name in names if isinstance(name, str))


def _offloading(metadata: Mapping[str, Any]) -> Offloading | None:
    entry = part(part(metadata, "scheduler"), "offloading")
    if not entry:
        return None
    return Offloading(
        spec=text(entry.get("spec")),
        host_bytes=count(metadata, "scheduler.offloading.host_bytes"),
        chunk_blocks=count(metadata, "scheduler.offloading.chunk_blocks"),
        prompts_only=flag(entry.get("prompts_only")),
        policy=text(entry.get("policy")),
        store_threshold=count(metadata, "scheduler.offloading.store_threshold"),
    )


def _scheduler(metadata: Mapping[str, Any]) -> Scheduler:
    entry = part(metadata, "scheduler")
    seqs, tokens = (
        count(metadata, "scheduler.max_num_seqs"),
        count(metadata, "scheduler.max_num_batched_tokens"),
    )
    active = count(metadata, "scheduler.max_num_active_seqs")
    scheduled = count(metadata, "scheduler.max_num_scheduled_tokens")
    return Scheduler(
        max_num_seqs=seqs,
        max_num_active_seqs=seqs if active is None else active,
        max_num_batched_tokens=tokens,
        max_num_scheduled_tokens=tokens if scheduled is None else scheduled,
        chunked_prefill=flag(entry.get("chunked_prefill")),
        long_prefill_token_threshold=count(metadata, "scheduler.long_prefill_token_threshold"),
        scheduler_reserve_full_isl=flag(entry.get("scheduler_reserve_full_isl")),
        watermark=number(entry.get("watermark")),
        policy=text(entry.get("policy")),
        async_scheduling=flag(entry.get("async_scheduling")),
        max_loras=count(metadata, "scheduler.max_loras"),
        connector=text(entry.get("connector")),
        offloading=_offloading(metadata),
        speculative_method=text(entry.get("speculative_method")),
        speculative_tokens=count(metadata, "scheduler.speculative_tokens"),
        drops_hit_unit=flag(entry.get("drops_hit_unit")),
        draft_slots=count(metadata, "scheduler.draft_slots"),
        lookahead_tokens=count(metadata, "scheduler.lookahead_tokens"),
    )


def _groups(metadata: Mapping[str, Any], cache: Mapping[str, Any]) -> Iterator[Group]:
    described = metadata.get("groups")
    if isinstance(described, Sequence) and not isinstance(described, str):
        for group in described:
            if isinstance(group, Mapping):
                yield _group(group)
        return
    sizes = cache.get("block_size")
    for size in sizes if isinstance(sizes, list) else [sizes]:
        if _block_size(size):
            yield Group(None, _block_size(size))


def _group(entry: Mapping[str, Any]) -> Group:
    return Group(
        text(entry.get("kind")),
        _block_size(entry.get("block_size")),
        whole(entry.get("bytes_per_block")),
        whole(entry.get("pool")) or 0,
        text(entry.get("layer_kind")),
        flag(entry.get("is_eagle_group")) or False,
        flag(entry.get("prefix_cacheable")) is not False,
        _tokens(entry.get("sliding_window")),
        _tokens(entry.get("attention_chunk_size")),
        _tokens(entry.get("extra_retained_tokens")),
        text(entry.get("mamba_cache_mode")),
        _tokens(entry.get("num_speculative_blocks")),
        _tokens(entry.get("num_prefill_checkpoint_blocks")),
        _tokens(entry.get("prefill_checkpoint_alignment")),
    )


def _retention(cache: Mapping[str, Any]) -> Retention | None:
    name = "prefix_cache_retention_interval"
    if name not in cache:
        return None
    shares = flag(cache.get("enable_mamba_shared_prefix_checkpoint")) or False
    return Retention(_tokens(cache[name]), shares)


def _tokens(value: Any) -> int | None:
    count = whole(value)
    return None if count is None or count > MOST_TOKENS else count


def _block_size(value: Any) -> int | None:
    size = whole(value)
    return size if size and size <= MOST_TOKENS else None


def _engine_ranks(metadata: Mapping[str, Any]) -> set[int]:
    ranks = (
        whole(process.get("rank"))
        for process in parts(metadata, "processes")
        if process.get("role") == "engine"
    )
    return {rank for rank in ranks if rank is not None}
