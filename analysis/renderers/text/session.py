# SPDX-License-Identifier: Apache-2.0
"""What ran, and what profiling it took."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from analysis.pool.usage import Usage, blocks_by_engine
from analysis.renderers.text.layout import Line, row, with_details
from analysis.summary import About
from analysis.tables.facts import Cost, Facts
from analysis.wording.formats import byte_size, duration, seconds


def lines(about: About, facts: Facts, usage: Usage) -> Iterator[Line]:
    details = [
        None if facts.layers is None else f"{facts.layers} layers",
        facts.dtype,
        None if facts.bytes_per_token is None else f"{facts.bytes_per_token:,} bytes a token",
    ]
    yield from row("Model", with_details(facts.model, details))
    yield from row("Time", _when(about, facts))
    versions = [f"{name} {version}" for name, version in facts.versions.items()]
    yield from row("Versions", ", ".join(versions) or "unknown")
    yield from row("Engines", _engines(facts))
    # Each engine sizes its own; the facts are the first one's, and count the null block.
    pools = {engine: blocks + 1 for engine, blocks in blocks_by_engine(usage).items()}
    differ = len(set(pools.values())) > 1
    yield from row("Pool", _pools(pools, facts) if differ else _pool(facts))
    if len(facts.groups) > 1:
        yield from row(
            "",
            f"The {len(facts.groups)} groups share these blocks, and a token needs a place in "
            "each: blocks x tokens a block is more than fits.",
        )
    if facts.max_concurrency is not None and facts.max_model_len is not None:
        # As vLLM prints it, so that a search in its log finds it.
        concurrency = (
            f"Maximum concurrency for {facts.max_model_len:,} tokens per request: "
            f"{facts.max_concurrency:.2f}x"
        )
        if differ:
            concurrency += f" (engine {min(pools)})"
        yield from row("Concurrency", concurrency)


def _when(about: About, facts: Facts) -> str:
    # To the second, without the date and time's joint: 2026-01-31 12:00:00Z.
    moment = re.sub(r"(?<=\d)T|\.\d+", " ", about.started_at or "").replace(" Z", "Z").strip()
    began = f"from {moment}" if moment else ""
    host = f"on {facts.host}" if facts.host else ""
    return " ".join(filter(None, [duration(about.duration_sec), began, host]))


def _engines(facts: Facts) -> str:
    parallel = [
        ("data", facts.data_parallel),
        ("tensor", facts.tensor_parallel),
        ("pipeline", facts.pipeline_parallel),
    ]
    sizes = [f"{kind} parallel {size}" for kind, size in parallel if size and size > 1]
    return with_details(str(len(facts.engines)) if facts.engines else None, sizes)


def _pools(pools: Mapping[int, int], facts: Facts) -> str:
    each = ", ".join(f"engine {engine} {blocks:,}" for engine, blocks in pools.items())
    return f"{each} blocks{_sizes(facts)}"


def _sizes(facts: Facts) -> str:
    sizes = sorted({group.block_size for group in facts.groups if group.block_size is not None})
    return f" of {' or '.join(f'{size:,}' for size in sizes)} tokens" if sizes else ""


def _pool(facts: Facts) -> str:
    if facts.pool_blocks is None:
        return "unknown"
    tokens = "" if facts.kv_tokens is None else f" = {facts.kv_tokens:,} tokens of KV cache"
    each = " an engine" if len(facts.engines) > 1 else ""
    groups = f" in {len(facts.groups)} groups" if len(facts.groups) > 1 else ""
    return f"{facts.pool_blocks:,} blocks{_sizes(facts)}{tokens}{each}{groups}"


def profiling(cost: Cost) -> Iterator[Line]:
    figures = [
        None
        if cost.hook_sec is None
        else f"{seconds(cost.hook_sec)} in the hooks at the ends of steps",
        None
        if cost.writing_sec is None
        else f"{seconds(cost.writing_sec)} of CPU time in the thread that writes",
        None if cost.journal_bytes is None else f"{byte_size(cost.journal_bytes)} of journal",
        None if cost.table_bytes is None else f"{byte_size(cost.table_bytes)} of tables",
    ]
    yield from row("Its own cost", ", ".join(filter(None, figures)) or "unknown")
