# SPDX-License-Identifier: Apache-2.0
"""What each captured graph cost, and what it gave."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.gpu.graph_ledger import Estimate, Graph, Ledger, Unused
from analysis.renderers.text.layout import LABEL, Line, note, row, table
from analysis.wording.formats import byte_size, counted, seconds, share
from analysis.wording.graph_ledger import cost, name
from analysis.wording.printable import shortened

HOTTEST = 10


def lines(ledger: Ledger | None) -> Iterator[Line]:
    """The section; empty where no graph is known."""
    if ledger is None:
        return
    yield from row("Captured", counted(ledger.total.graphs, "graph"), cost(ledger.total))
    if ledger.profiling.graphs:
        trials = counted(ledger.profiling.graphs, "graph")
        yield from row(
            "Trial captures", trials, f"{cost(ledger.profiling)}; to estimate memory, thrown away"
        )
    yield from _by_mode(ledger)
    estimate = ledger.estimate
    yield from _unused(ledger.unused, applied=None if estimate is None else estimate.applied)
    if estimate is not None:
        yield from _estimate(estimate)
    if ledger.unknown_replays:
        replays = counted(ledger.unknown_replays, "replay")
        yield from row("Unknown", replays, "of graphs whose capture was not recorded")
    yield from _hottest([graph for graph in ledger.graphs if graph.replays])


def _by_mode(ledger: Ledger) -> Iterator[Line]:
    rows = [
        (
            mode.mode,
            f"{mode.total.graphs:,}",
            f"{mode.total.cuda_graphs:,}",
            _memory(mode.total.memory_bytes),
            seconds(mode.total.capture_sec),
            f"{mode.replays:,}",
        )
        for mode in ledger.by_mode
    ]
    if rows:
        yield from table(("", "graphs", "CUDA graphs", "memory", "captured in", "replays"), rows)


def _unused(unused: Unused, *, applied: bool | None) -> Iterator[Line]:
    if unused.never.graphs:
        yield from row("Never replayed", counted(unused.never.graphs, "graph"), cost(unused.never))
    if unused.dummy_only.graphs:
        yield from row(
            "In dummies alone", counted(unused.dummy_only.graphs, "graph"), cost(unused.dummy_only)
        )
    if unused.more_blocks is None or not unused.more_blocks_most:
        return
    said = ["graphs share a memory pool, so small ones take almost nothing"]
    if unused.more_blocks_most > unused.more_blocks:
        said = [
            (
                f"up to {unused.more_blocks_most:,} if the graphs captured first in each mode "
                "count, too: they pay for the pool that the others share, and without them the "
                "next ones would"
            )
        ]
    if applied:
        said.append("the KV cache gets them only if vLLM's estimate shrinks by as much")
    elif applied is False:
        said.append("no estimate was taken off the KV cache: it gets them if it asks for more")
    blocks = counted(unused.more_blocks, "KV block")
    yield from row("Without these", f"{blocks} more", "; ".join(said))


def _estimate(estimate: Estimate) -> Iterator[Line]:
    figures = (
        ("reserved by estimate", estimate.estimated_bytes),
        ("found by vLLM", estimate.measured_bytes),
        ("sum of the captures", estimate.captured_bytes),
    )
    sizes = [f"{byte_size(size)} {name}" for name, size in figures if size is not None]
    if not sizes:
        return
    yield from row("Graph memory", ", ".join(sizes))
    if estimate.ratio is not None:
        yield from row("", f"{estimate.ratio:.2f} times what it took", _applied(estimate))


def _applied(estimate: Estimate) -> str:
    if not estimate.applied:
        return "not taken off the KV cache" if estimate.applied is False else ""
    if not estimate.blocks:
        return "taken off the KV cache"
    many = counted(abs(estimate.blocks), "block")
    if estimate.blocks > 0:
        return f"taken off the KV cache: {many} too few"
    return f"taken off the KV cache: {many} more than there was memory for, as asked"


def _hottest(used: list[Graph]) -> Iterator[Line]:
    rows = [
        (
            shortened(name(graph), LABEL),
            f"{graph.replays:,}",
            "" if graph.tokens is None else f"{graph.tokens:,}",
            "" if graph.padding is None else share(graph.padding_share),
            _memory(graph.memory_bytes),
            "" if graph.capture_sec is None else seconds(graph.capture_sec),
        )
        for graph in used[:HOTTEST]
    ]
    if not rows:
        return
    heads = ("Hottest", "replays", "tokens", "padding", "memory", "captured")
    yield from table(heads, rows)
    if len(used) > HOTTEST:
        yield from note(f"{len(used) - HOTTEST:,} more graphs were replayed less often.")


def _memory(size: int | None) -> str:
    return "" if size is None else byte_size(size)
