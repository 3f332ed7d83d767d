# SPDX-License-Identifier: Apache-2.0
"""What each captured graph cost, and what it gave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.gpu.graph_ledger import Graph, Ledger, Total
from analysis.renderers.html.chart import Bars, Chart, Segment, Table
from analysis.renderers.html.report import Report
from analysis.wording.formats import byte_size, counted, number, seconds, share
from analysis.wording.graph_ledger import cost, name
from analysis.wording.printable import abridged

HOTTEST = 10
"""Graphs with a bar of their own."""
LISTED = 200
"""Rows of the table at most."""


def charts(report: Report) -> Iterator[Chart]:
    """One chart; none where no graph is known."""
    ledger = report.summary.graph_ledger
    if ledger is None:
        return
    used = [graph for graph in ledger.graphs if graph.replays]
    rows = [
        *((_label(graph), _cost(graph), [graph]) for graph in used[:HOTTEST]),
        *_unused(ledger),
    ]
    yield Chart(
        "ledger",
        "What did each graph cost, and what did it give?",
        "Graphs that no batch needed cost start-up time, and memory that the KV cache could have "
        "had; trial captures are not among them.",
        _words(ledger),
        Bars(
            [label for label, _, _ in rows],
            [text for _, text, _ in rows],
            [
                Segment(
                    "tokens", [_sum(graph.tokens for graph in of) for _, _, of in rows], "held"
                ),
                Segment(
                    "padding", [_sum(graph.padding for graph in of) for _, _, of in rows], "regret"
                ),
            ],
            "tokens computed, padding with them",
        )
        if rows
        else None,
        _table(ledger.graphs) if rows else None,
    )


_Row = tuple[str, str, Sequence[Graph]]
"""A bar's label, its figures, and the graphs that it stands for."""


def _label(graph: Graph) -> str:
    return abridged(name(graph))


def _cost(graph: Graph) -> str:
    figures = [counted(graph.replays, "replay")]
    if graph.memory_bytes is not None:
        figures.append(byte_size(graph.memory_bytes))
    if graph.capture_sec is not None:
        figures.append(seconds(graph.capture_sec))
    return ", ".join(figures)


def _unused(ledger: Ledger) -> Iterator[_Row]:
    for label, total in (
        ("in dummy executions alone", ledger.unused.dummy_only),
        ("never replayed", ledger.unused.never),
    ):
        if total.graphs:
            yield f"{total.graphs:,} {label}", cost(total), ()


def _sum(values: Iterator[int | None]) -> int:
    return sum(value or 0 for value in values)


def _words(ledger: Ledger) -> str:
    said = [f"{counted(ledger.total.graphs, 'graph')} captured{_took(ledger.total)}."]
    unused = ledger.unused
    if unused.more_blocks is not None and unused.more_blocks_most:
        blocks = f"{counted(unused.more_blocks, 'more KV block')}"
        said.append(f"Without the unused ones there would be {blocks}{_limits(ledger)}.")
    others = [graph.replays for graph in ledger.graphs if graph.replays][HOTTEST:]
    if others:
        more = counted(len(others), "more graph")
        said.append(f"{more} had {sum(others):,} replays.")
    if ledger.profiling.graphs:
        trials = counted(ledger.profiling.graphs, "trial capture")
        said.append(f"{trials} to estimate memory came before{_took(ledger.profiling)}.")
    if ledger.unknown_replays:
        replays = counted(ledger.unknown_replays, "replay")
        said.append(f"{replays} were of graphs whose capture was not recorded.")
    if len(ledger.graphs) > LISTED:
        said.append(f"The table has the {LISTED:,} that were replayed most.")
    return " ".join(said)


def _limits(ledger: Ledger) -> str:
    """What those blocks depend on."""
    limits = ""
    if (ledger.unused.more_blocks_most or 0) > (ledger.unused.more_blocks or 0):
        limits = (
            f" (up to {ledger.unused.more_blocks_most:,} if the graphs captured first in each mode "
            "count, too: they pay for the pool that the others share, and without them the next "
            "ones would)"
        )
    if ledger.estimate is not None and ledger.estimate.applied:
        limits += ", but only if vLLM's estimate shrinks by as much"
    return limits


def _took(total: Total) -> str:
    return f": {cost(total)}" if total.graphs else ""


def _table(graphs: Sequence[Graph]) -> Table:
    return Table(
        (
            "Graph",
            "requests",
            "CUDA graphs",
            "memory",
            "captured in",
            "replays",
            "in dummies",
            "tokens",
            "padding",
            "launch",
            "on the GPU",
        ),
        [_row(graph) for graph in graphs[:LISTED]],
    )


def _row(graph: Graph) -> tuple[str, ...]:
    pool = " (pool)" if graph.pays_for_pool else ""
    return (
        _label(graph),
        number(graph.num_reqs),
        number(graph.cuda_graphs),
        "n/a" if graph.memory_bytes is None else f"{byte_size(graph.memory_bytes)}{pool}",
        seconds(graph.capture_sec),
        f"{graph.replays:,}" if graph.replays or graph.dummy_replays else "never",
        f"{graph.dummy_replays:,}",
        number(graph.tokens),
        share(graph.padding_share),
        *("n/a" if us is None else seconds(us / 1e6) for us in (graph.launch_us, graph.gpu_us)),
    )
