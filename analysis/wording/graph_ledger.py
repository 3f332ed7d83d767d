# SPDX-License-Identifier: Apache-2.0
"""A graph's name, and what graphs cost."""

from __future__ import annotations

from analysis.gpu.graph_ledger import Graph, Total
from analysis.wording.formats import byte_size, seconds


def name(graph: Graph) -> str:
    """The graph by its descriptor, short."""
    size = "" if graph.num_tokens is None else f" {graph.num_tokens:,}"
    part = "" if graph.part in (None, "model") else f" {graph.part}"
    return f"{graph.mode or 'unknown'}{size}{' LoRA' if graph.has_lora else ''}{part}"


def cost(total: Total) -> str:
    """What the graphs took, in words."""
    memory = "" if total.memory_bytes is None else f"{byte_size(total.memory_bytes)} and "
    graphs = f"{total.cuda_graphs:,} CUDA graphs, " if total.cuda_graphs != total.graphs else ""
    return f"{graphs}{memory}{seconds(total.capture_sec)} on worker {total.worker}"
