# SPDX-License-Identifier: Apache-2.0
"""Would other CUDA graphs serve this load better, and does their memory fit?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from analysis.gpu.capture_sizes import CaptureSizes, Fit
from analysis.judgement.advice.thresholds import (
    COVERED,
    FEW,
    LARGEST_UTILIZATION,
    MUCH,
    SOME,
    UNDER_USED_PCT,
)
from analysis.summary import Advice, Effect, Summary
from analysis.wording.formats import byte_size, counted, seconds, share

SMALL_BATCH = 256
"""Tokens. The kernels of a smaller batch usually take the GPU less time than the host."""
LARGEST_DEFAULT = 1024
"""The largest size that vLLM 0.32 captures by default on any GPU (config/vllm.py)."""
FAR_OFF = 3.0
"""An estimate is far off from this factor on, up or down."""
START_UP_SEC = 5.0
"""So much start-up time is worth a change."""
MANY = 1_000
"""So many executions must have been seen before a size counts as unneeded."""


def none_asked_for(summary: Summary) -> Advice | None:
    """CUDA graphs were turned off."""
    graphs = summary.cuda_graphs
    eager = next((part for part in graphs.eager if part.reason == "asked_none"), None)
    has_graphs = graphs.setup.device in (None, "cuda")
    if eager is None or eager.executions < FEW or not has_graphs:
        return None
    return Advice(
        about="CUDA graphs",
        says="Let vLLM capture CUDA graphs: take out --enforce-eager, or cudagraph_mode NONE.",
        flag=None,
        value=None,
        evidence=(
            (
                f"{counted(eager.executions, 'execution')} launched every kernel one by one; half "
                f"of them had at most {counted(eager.p50_tokens, 'token')}"
            ),
        ),
        expect=(
            "Less time on the host between kernels, which small batches wait for; start-up takes "
            "longer, and graphs take memory from the KV cache."
        ),
        confidence="medium",
    )


def decodes_without_full_graphs(summary: Summary) -> Advice | None:
    """The largest batches of decodes have no FULL graph: a size is missing."""
    sizes = summary.capture_sizes
    gap = None if sizes is None else sizes.decode_gap
    if sizes is None or gap is None or gap.executions < SOME * summary.cuda_graphs.executions:
        return None
    better = sizes.least_padding
    if gap.add is None and better is not None:
        says = f"Capture graphs for larger batches of decodes, of up to {gap.to_tokens:,} tokens."
        flag, value = _sizes(summary, better.sizes)
    else:
        size = gap.to_tokens
        says = f"Capture a graph for the largest batches of decodes: add the size {size:,}."
        flag, value = _sizes(summary, sorted({*sizes.today.sizes, size}))
    ran = "eagerly" if gap.ran == "NONE" else f"in {gap.ran} graphs"
    decodes = "" if gap.decode_steps is None else f"; {gap.decode_steps:,} steps had decodes alone"
    return Advice(
        about="capture sizes",
        says=says,
        flag=flag,
        value=value,
        evidence=(
            (
                f"{counted(gap.executions, 'execution')} of {gap.from_tokens:,} to "
                f"{gap.to_tokens:,} tokens ran {ran}{decodes}"
            ),
            (
                "vLLM captures FULL graphs for at most max_num_seqs requests, "
                f"{gap.to_tokens:,} tokens, and no size in the list lies there"
            ),
        ),
        expect=(
            "Each of them runs in a FULL graph. With another --max-num-seqs, put that number into "
            f"the list instead{_times(sizes.step)}."
        ),
        confidence="high" if gap.decode_steps else "medium",
        known="modelled",
        # The graph that is added holds each of these batches.
        effects=(Effect("without_full_graph", gap.executions, 0),),
    )


def larger_graphs(summary: Summary) -> Advice | None:
    """Batches were larger than the largest graph."""
    graphs, sizes = summary.cuda_graphs, summary.capture_sizes
    large = next((part for part in graphs.eager if part.reason == "too_large"), None)
    if sizes is None or large is None or graphs.executions < FEW:
        return None
    if (graphs.execution_share or 0.0) >= COVERED or large.execution_share < MUCH:
        return None
    better = sizes.least_padding
    gain = better.execution_share - sizes.today.execution_share if better is not None else 0.0
    fits = better is not None and gain >= MUCH
    if better is not None and fits:
        flag, value = _sizes(summary, better.sizes)
        size, is_for_decodes = better.sizes[-1], True
    elif sizes.for_coverage is not None and sizes.for_coverage <= LARGEST_DEFAULT:
        size, is_for_decodes = sizes.for_coverage, False
        flag, value = "--max-cudagraph-capture-size", f"{size}"
    else:
        return None
    return Advice(
        about="capture sizes",
        says=f"Capture graphs for batches of up to {size:,} tokens.",
        flag=flag,
        value=value,
        evidence=(
            f"{share(graphs.execution_share)} of executions ran in a graph; over 90 % is usual",
            (
                f"{counted(large.executions, 'execution')} had more tokens than the largest size, "
                f"{sizes.today.sizes[-1]:,}: half of them at most {large.p50_tokens:,}"
            ),
        ),
        expect=(
            "More batches in graphs, for more memory and a longer start-up. Batches with prompts "
            "gain little: their kernels take longer than launching them."
        ),
        confidence="medium" if is_for_decodes else "low",
        known="modelled" if fits else "estimated",
        effects=_effects(sizes, better) if better is not None and fits else (),
    )


def less_padding(summary: Summary) -> Advice | None:
    """As many sizes, chosen better, would pad much less."""
    sizes = summary.capture_sizes
    better = None if sizes is None else sizes.least_padding
    if sizes is None or better is None or sizes.executions < FEW:
        return None
    if sizes.today.padding_share - better.padding_share < MUCH:
        return None
    flag, value = _sizes(summary, better.sizes)
    return Advice(
        about="capture sizes",
        says="Capture the sizes that the batches have.",
        flag=flag,
        value=value,
        evidence=(
            (
                f"{share(sizes.today.padding_share)} of what graphs computed was padding: "
                f"{sizes.today.padding:,} tokens, with {len(sizes.today.sizes):,} sizes"
            ),
            f"{len(better.sizes):,} sizes would have padded {better.padding:,} tokens",
        ),
        expect=(
            f"{share(better.padding_share)} of padding for batches like these. Other batches pad "
            "more, as the sizes fit this session."
        ),
        confidence="medium",
        known="modelled",
        effects=_effects(sizes, better),
    )


def unused_graphs(summary: Summary) -> Advice | None:
    """Most graphs were captured for nothing, and capturing took long or much memory."""
    ledger, sizes = summary.graph_ledger, summary.capture_sizes
    fewest = None if sizes is None else sizes.fewest
    if ledger is None or sizes is None or fewest is None or sizes.executions < MANY:
        return None
    # Larger batches than this session's must still have a graph.
    kept = sorted({*fewest.sizes, sizes.today.sizes[-1]})
    never, blocks = ledger.unused.never, ledger.unused.more_blocks or 0
    pool = summary.facts.pool_blocks
    is_large = bool(pool) and blocks >= SOME * (pool or 0)
    if 2 * never.graphs < ledger.total.graphs or len(kept) >= len(sizes.today.sizes):
        return None
    if never.capture_sec < START_UP_SEC and not is_large:
        return None
    flag, value = _sizes(summary, kept)
    memory = f" and {byte_size(never.memory_bytes)}" if never.memory_bytes else ""
    room = f", and room for up to {counted(blocks, 'KV block')}" if blocks else ""
    return Advice(
        about="capture sizes",
        says="Capture fewer sizes.",
        flag=flag,
        value=value,
        evidence=(
            (
                f"{never.graphs:,} of {counted(ledger.total.graphs, 'graph')} were never replayed; "
                f"capturing them took {seconds(never.capture_sec)}{memory}"
            ),
            (
                f"{counted(len(kept), 'size')} would pad these batches no more than today's "
                f"{len(sizes.today.sizes):,}"
            ),
        ),
        expect=f"A shorter start-up{room}; batches of other sizes than this session's pad more.",
        confidence="medium",
        known="modelled",
        effects=_effects(sizes, fewest),
    )


def overcommitted(summary: Summary) -> Advice | None:
    """Graphs took more memory than was reserved for them, and the GPU is full."""
    memory, facts = summary.memory, summary.facts
    estimate = None if summary.graph_ledger is None else summary.graph_ledger.estimate
    found, tight = memory.start_up, _tightest(summary)
    if estimate is None or found is None or tight is None or not found.total_bytes:
        return None
    took = _took(summary)
    reserved = (estimate.estimated_bytes or 0) if estimate.applied else 0
    utilization = facts.gpu_memory_utilization
    if took is None or utilization is None or tight >= SOME * found.total_bytes:
        return None
    if took < max(FAR_OFF * reserved, 1):
        return None
    value = _rounded(utilization - (took - reserved) / found.total_bytes)
    return Advice(
        about="pool",
        says="Leave the graphs their room: ask for less of the GPU's memory.",
        flag="--gpu-memory-utilization",
        value=f"{value:.4f}",
        evidence=(
            f"graphs took {byte_size(took)}, and {byte_size(reserved)} were reserved for them",
            f"at the peak {byte_size(tight)} of the GPU's memory were free",
        ),
        expect=(
            f"{byte_size(took - reserved)} less for the KV cache, and no failure when something "
            "needs a little more."
        ),
        confidence="medium",
    )


def overestimated(summary: Summary) -> Advice | None:
    """Much more memory was reserved for graphs than they took."""
    facts, usage, found = summary.facts, summary.usage.combined, summary.memory.start_up
    estimate = None if summary.graph_ledger is None else summary.graph_ledger.estimate
    took, utilization = _took(summary), facts.gpu_memory_utilization
    if estimate is None or usage is None or found is None or not found.total_bytes:
        return None
    if took is None or utilization is None or not estimate.applied:
        return None
    if (estimate.ratio or 0.0) < FAR_OFF or (estimate.blocks or 0) < SOME * (found.blocks or 0):
        return None
    more = (estimate.estimated_bytes or 0) - took
    value = _rounded(utilization + more / found.total_bytes)
    tight = _tightest(summary)
    if usage.peak_pct < UNDER_USED_PCT or value > LARGEST_UTILIZATION:
        return None
    if tight is not None and tight - more < SOME * found.total_bytes:
        return None
    return Advice(
        about="pool",
        says="Give the KV cache the memory that is reserved for graphs and that they do not take.",
        flag="--gpu-memory-utilization",
        value=f"{value:.4f}",
        evidence=(
            (
                f"{byte_size(estimate.estimated_bytes or 0)} were reserved for graphs, and they "
                f"took {byte_size(took)}"
            ),
        ),
        expect=f"{counted(estimate.blocks or 0, 'KV block')} more, from memory that lies idle.",
        confidence="medium",
    )


def _effects(sizes: CaptureSizes, better: Fit) -> tuple[Effect, ...]:
    """What these sizes do to the batches that ran, each of which both lists were tried on."""
    today = sizes.today
    return (
        Effect("graph_share", today.execution_share, better.execution_share),
        Effect("padding_share", today.padding_share, better.padding_share),
    )


def _took(summary: Summary) -> int | None:
    """Bytes that graphs took on the worker that decides: as vLLM measured, or else by captures."""
    estimate = None if summary.graph_ledger is None else summary.graph_ledger.estimate
    if estimate is None:
        return None
    measured = estimate.measured_bytes
    return estimate.captured_bytes if measured is None else measured


def _tightest(summary: Summary) -> int | None:
    """Free bytes on the fullest GPU at its peak."""
    return min((gpu.free_bytes for gpu in summary.memory.gpus if gpu.workers), default=None)


def _rounded(utilization: float) -> float:
    """Rounded down: too much memory fails, too little does not."""
    return math.floor(utilization * 1e4) / 1e4


def _sizes(summary: Summary, sizes: Sequence[int]) -> tuple[str, str]:
    """The flag that sets the sizes in the release that ran, and its value."""
    flag = "cudagraph-capture-sizes"
    if flag in summary.facts.settings:
        return f"--{flag}", " ".join(map(str, sizes))
    return "--compilation-config", f"'{{\"cudagraph_capture_sizes\": {list(sizes)}}}'"


def _times(step: int) -> str:
    return f", times {step} tokens a request" if step > 1 else ""
