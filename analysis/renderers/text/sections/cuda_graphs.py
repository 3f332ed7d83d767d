# SPDX-License-Identifier: Apache-2.0
"""How much ran in CUDA graphs, what was padding, and which sizes would serve better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.gpu.capture_sizes import CaptureSizes, DecodeGap, Fit
from analysis.gpu.cuda_graphs import CudaGraphs, Eager, Padding
from analysis.renderers.text.layout import Line, note, row, table
from analysis.wording.cuda_graphs import WHY_EAGER, fits
from analysis.wording.formats import counted, ranges, seconds, share

SIZES = 8
"""Rows of the table of sizes."""
WORKERS = 8


def lines(graphs: CudaGraphs, sizes: CaptureSizes | None) -> Iterator[Line]:
    """The section; one line where nothing is known."""
    if graphs.absent is not None:
        yield from note(graphs.absent)
        return
    yield from _modes(graphs)
    yield from _coverage(graphs)
    yield from _eager(graphs.eager)
    yield from _workers(graphs)
    if graphs.in_graphs:
        yield from _padding(graphs.padding)
    if sizes is not None:
        yield from _sizes(sizes)
        if sizes.today.padding < graphs.padding.tokens:
            more = graphs.padding.tokens - sizes.today.padding
            yield from note(
                f"Padding was {more:,} tokens more than the next capture sizes explain: "
                "data-parallel ranks, for one, run the size of the largest batch among them."
            )


def _modes(graphs: CudaGraphs) -> Iterator[Line]:
    setup = graphs.setup
    asked = (setup.asked or "unknown", *[""] * len(graphs.by_mode))
    resolved = (setup.resolved or "unknown", *[""] * len(graphs.by_mode))
    ran = [f"{use.mode} {share(use.execution_share)}" for use in graphs.by_mode]
    heads = ("Mode", "asked for", "resolved to", "what ran")
    yield from table(heads, [("", *modes) for modes in zip(asked, resolved, ran, strict=False)])
    by = [
        f"{', '.join(setup.attention_backends)} (attention)" if setup.attention_backends else "",
        f"model runner {setup.runner}" if setup.runner else "",
    ]
    if any(by):
        yield from row("Resolved by", ", ".join(filter(None, by)))


def _coverage(graphs: CudaGraphs) -> Iterator[Line]:
    executed = f"of {counted(graphs.executions, 'execution')} (over 90 % is good)"
    yield from row("In a graph", share(graphs.execution_share), executed)
    yield from row("", share(graphs.token_share), f"of {counted(graphs.tokens, 'token')}")
    if graphs.dummy_executions:
        yield from row("Left out", counted(graphs.dummy_executions, "dummy execution"))
    rows = [
        (
            use.mode if use.mode != "NONE" else "NONE (eager)",
            f"{use.executions:,}",
            f"{use.tokens:,}",
            share(use.token_share),
            "" if use.launch_us is None else seconds(use.launch_us / 1e6),
            "" if use.gpu_us is None else seconds(use.gpu_us / 1e6),
        )
        for use in graphs.by_mode
    ]
    yield from table(("", "executions", "tokens", "of tokens", "launch", "on the GPU"), rows)


def _eager(eager: Sequence[Eager]) -> Iterator[Line]:
    if not eager:
        return
    rows = [
        (
            WHY_EAGER[part.reason],
            f"{part.executions:,}",
            share(part.execution_share),
            f"{part.p50_tokens:,}",
            f"{part.largest_tokens:,}",
        )
        for part in eager
    ]
    heads = ("Eager because", "executions", "of all", "median tokens", "largest")
    yield from table(heads, rows)
    for part in eager:
        if part.reason == "too_large":
            most = (f"{batch.tokens:,}, {batch.executions:,} times" for batch in part.most)
            yield from row("Commonest of these", "; ".join(most))


def _workers(graphs: CudaGraphs) -> Iterator[Line]:
    """The workers, where they did not all run the same."""
    workers = graphs.by_worker
    figures = {(use.executions, use.execution_share, use.padding_share) for use in workers}
    if len(figures) < 2:
        return
    apart = sorted(workers, key=lambda use: (use.execution_share or 0.0, use.worker))[:WORKERS]
    rows = [
        (
            f"Worker {use.worker}",
            f"{use.executions:,}",
            share(use.execution_share),
            share(use.token_share),
            share(use.padding_share),
        )
        for use in apart
    ]
    yield from table(("", "executions", "in a graph", "of tokens", "padding"), rows)
    if len(apart) < len(workers):
        yield from note(f"{len(workers) - len(apart)} more workers have a larger share in graphs.")


def _padding(padding: Padding) -> Iterator[Line]:
    yield from row(
        "Padding", share(padding.share), f"{padding.tokens:,} of the tokens that graphs computed"
    )
    most = sorted(padding.by_size, key=lambda size: (-size.padding, size.size))
    rows = [
        (
            f"Padded to {size.size:,}",
            f"{size.full:,}",
            f"{size.piecewise:,}",
            f"{size.padding:,}",
            share(size.share),
        )
        for size in most[:SIZES]
        if size.padding
    ]
    if not rows:
        return
    yield from table(("", "FULL", "PIECEWISE", "padding tokens", "of computed"), rows)
    worst = "; ".join(
        f"{batch.tokens:,} to {batch.size:,}, {batch.executions:,} times" for batch in padding.worst
    )
    yield from row("Costliest", worst)


def _sizes(sizes: CaptureSizes) -> Iterator[Line]:
    if sizes.decode_gap is not None:
        yield from _gap(sizes.decode_gap)
    found = [(name.capitalize(), fit) for name, fit in fits(sizes)]
    if len(found) == 1:
        return
    rows = [(name, *_fit(fit)) for name, fit in found]
    yield from table(("Capture sizes", "sizes", "in a graph", "of tokens", "padding", ""), rows)
    for name, fit in found:
        yield from row(name, ranges(fit.sizes))
    if sizes.step > 1:
        yield from note(
            f"Sizes are tokens. With speculation a batch of decodes has {sizes.step} tokens a "
            f"request, so these are multiples of {sizes.step}."
        )
    yield from note(
        "Computed from this session's batches, each padded to the next size; another load would "
        "pad more."
    )


def _gap(gap: DecodeGap) -> Iterator[Line]:
    """What no FULL graph can hold."""
    batches = f"batches of {gap.from_tokens:,} to {gap.to_tokens:,} tokens"
    decodes = "" if gap.decode_steps is None else f", {gap.decode_steps:,} steps of decodes"
    ran = "eagerly" if gap.ran == "NONE" else gap.ran
    why = (
        f"ran {ran} ({counted(gap.executions, 'execution')}{decodes}): vLLM captures FULL graphs "
        f"for decodes of up to max_num_seqs requests, {gap.to_tokens:,} tokens, and no "
        "capture size is in that range"
    )
    if gap.add is None:
        yield from row("Without FULL graph", batches, why)
    else:
        yield from row("Size to add", f"{gap.add:,}", f"{batches} {why}")


def _fit(fit: Fit) -> tuple[str, ...]:
    return (
        f"{len(fit.sizes):,}",
        share(fit.execution_share),
        share(fit.token_share),
        f"{fit.padding:,}",
        share(fit.padding_share),
    )
