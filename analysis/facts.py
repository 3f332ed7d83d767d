# SPDX-License-Identifier: Apache-2.0
"""What ran: the session's facts out of metadata.json, and what it says went wrong.

Every fact may be missing, in an old session or one of a strange release, and is then None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.session import Session


@dataclass(frozen=True)
class Group:
    """A KV cache group: ``kind`` is vLLM's name for how it caches, ``block_size`` in tokens."""

    kind: str | None
    block_size: int | None


@dataclass(frozen=True)
class Facts:
    """The engine's configuration; with several engines, the first one's.

    ``engines``: the data-parallel ranks that recorded. ``pool_blocks`` counts the null block, as
    vLLM's own figure does. ``kv_tokens`` and ``max_concurrency`` are what vLLM prints at
    start-up, the latter for ``max_model_len`` tokens a request.
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
    engines: tuple[int, ...]
    host: str | None
    versions: Mapping[str, str]


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


def _groups(metadata: Mapping[str, Any], cache: Mapping[str, Any]) -> Iterator[Group]:
    described = metadata.get("groups")
    if isinstance(described, Sequence) and not isinstance(described, str):
        for group in described:
            if isinstance(group, Mapping):
                yield Group(_text(group.get("kind")), _whole(group.get("block_size")))
        return
    sizes = cache.get("block_size")
    for size in sizes if isinstance(sizes, list) else [sizes]:
        if _whole(size) is not None:
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


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None
