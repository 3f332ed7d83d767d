# SPDX-License-Identifier: Apache-2.0
"""What did each captured graph cost, and how often was it of use?

The ledger covers the whole session, warm-up included, since start-up captures the graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import polars as pl

from analysis.gpu import captures as capturing
from analysis.gpu.executions import DESCRIPTOR
from analysis.gpu.memory import Memory, StartUp
from analysis.tables.facts import Facts
from analysis.tables.session import Session

USAGE = "cuda_graph_usage"

_GRAPH = (*DESCRIPTOR, "part", "source")
"""The columns by which the graphs of one worker differ."""


@dataclass(frozen=True)
class Graph:
    """The graph of one batch descriptor, on all workers that captured it.

    ``mode``, ``num_tokens`` (padded), ``num_reqs``, ``uniform`` (all requests have the same number
    of tokens: decodes) and ``has_lora`` are the descriptor, None where it leaves them open.
    ``part``: ``model``, ``drafter``, ``encoder`` or ``unknown``. ``source``: the class of vLLM that
    captured it. ``workers``: how many captured it; ``captures``: the most of any worker, more than
    one where graphs were cleared and captured again. ``cuda_graphs``: how many it consists of, one
    for each piece of the model.

    ``memory_bytes`` (of the last capture) and ``capture_sec`` are those of the worker where they
    are largest, since workers capture side by side; None where not recorded. ``pays_for_pool``: it
    was captured first of its mode, so its memory is the pool that later graphs use again.

    ``replays``: in executions that served requests, of all workers together; ``dummy_replays``: in
    other ones. ``tokens`` and ``padding``: what it computed for requests, None for other parts than
    the model, whose batches are not in the timeline. ``launch_us`` and ``gpu_us``: means of a
    replay, dummy ones included, None where not measured.
    """

    mode: str | None
    num_tokens: int | None
    num_reqs: int | None
    uniform: bool | None
    has_lora: bool | None
    part: str | None
    source: str | None
    workers: int
    captures: int
    cuda_graphs: int | None
    memory_bytes: int | None
    capture_sec: float | None
    pays_for_pool: bool
    replays: int
    dummy_replays: int
    tokens: int | None
    padding: int | None
    launch_us: float | None
    gpu_us: float | None

    @property
    def padding_share(self) -> float | None:
        """Padding, of all tokens that it computed, from 0 to 1; None where it computed none."""
        computed = (self.tokens or 0) + (self.padding or 0)
        return None if self.padding is None or not computed else self.padding / computed


@dataclass(frozen=True)
class Total:
    """What graphs cost on the ``worker`` where they cost most, None where there are none.

    ``memory_bytes``: None where not recorded.
    """

    worker: int | None
    graphs: int
    cuda_graphs: int
    memory_bytes: int | None
    capture_sec: float


@dataclass(frozen=True)
class ModeTotal:
    """All graphs of a mode: their cost, and the ``replays`` of all workers."""

    mode: str
    total: Total
    replays: int


@dataclass(frozen=True)
class Unused:
    """Graphs that no request ever needed.

    ``never``: those that were never replayed. ``dummy_only``: those that only dummy executions
    replayed. ``more_blocks``: KV cache blocks that fit into their memory. A graph that pays for
    its pool is left out, since the next one would pay in its place; ``more_blocks_most`` includes
    it. Both are None where the size of a block or the memory is not known.
    """

    never: Total
    dummy_only: Total
    more_blocks: int | None
    more_blocks_most: int | None


@dataclass(frozen=True)
class Estimate:
    """What vLLM reserved for graphs and what they took, in bytes, on the ``worker`` that decides
    the size of the KV cache.

    ``estimated_bytes``: by vLLM's trial captures; ``applied``: whether vLLM made the KV cache
    smaller by it. ``measured_bytes``: what capturing took, as vLLM measured it.
    ``captured_bytes``: the sum of all captures, as the hooks measured them. ``ratio``: estimated
    by measured (by captured where vLLM did not measure), None where either is not known or 0.
    ``blocks``: the difference in KV cache blocks, positive where too much was reserved.
    """

    worker: int | None
    estimated_bytes: int | None
    applied: bool | None
    measured_bytes: int | None
    captured_bytes: int | None
    ratio: float | None
    blocks: int | None


@dataclass(frozen=True)
class Ledger:
    """``graphs``: all graphs without trial ones, those with most replays first. ``total`` and
    ``by_mode``: their cost. ``profiling``: the cost of trial captures, which start-up makes to
    estimate memory and throws away. ``unused``: graphs that no request needed. ``replays``: of all
    graphs, without dummy ones; ``unknown_replays``: those of graphs whose capture was not recorded.
    ``estimate``: what vLLM reserved for graphs, None where no worker recorded it.
    """

    graphs: tuple[Graph, ...]
    total: Total
    by_mode: tuple[ModeTotal, ...]
    profiling: Total
    unused: Unused
    replays: int
    unknown_replays: int
    estimate: Estimate | None


def measure(
    session: Session, facts: Facts, memory: Memory, captured: pl.DataFrame, ran: pl.DataFrame
) -> Ledger | None:
    """The ledger; None where no graph is known.

    Args:
        session: the session.
        facts: of the session.
        memory: of its workers.
        captured: what ``analysis.gpu.captures.read`` returns.
        ran: what ``analysis.gpu.executions.read`` returns.

    Raises:
        SessionError: the table of replays cannot be read.

    """
    used = session.collect(USAGE, lambda table: table, history=True)
    if not captured.height and not used.height:
        return None
    rows = _by_worker(capturing.without_trials(captured), used, ran)
    known = rows.filter(pl.col("captures") > 0)
    unused = known.filter(pl.col("all_replays") == 0)
    return Ledger(
        graphs=tuple(_graphs(known)),
        total=_total(known),
        by_mode=tuple(
            ModeTotal(mode or "unknown", _total(part), int(part["replays"].sum()))
            for (mode,), part in sorted(known.group_by("runtime_mode"), key=_mode)
        ),
        profiling=_profiling(captured),
        unused=_unused(unused, facts.bytes_per_block),
        replays=int(rows["replays"].sum()),
        unknown_replays=int(rows.filter(pl.col("captures") == 0)["replays"].sum()),
        estimate=_estimate(memory.start_up, known, facts.bytes_per_block),
    )


def _by_worker(kept: pl.DataFrame, used: pl.DataFrame, ran: pl.DataFrame) -> pl.DataFrame:
    """A row for each graph of each worker, with the replays of all workers beside its own."""
    cost = kept.select(
        "worker",
        *_GRAPH,
        captures=pl.lit(1),
        cuda_graphs="num_graphs",
        memory_bytes="memory_bytes",
        capture_sec="duration_sec",
        captured_at="capture_time_sec",
    )
    use = used.select(
        "worker",
        *_GRAPH,
        all_times="replay_count",
        dummy_replays=pl.col("dummy_count").fill_null(0),
        launch_sec="total_launch_sec",
        gpu_sec="total_gpu_sec",
    )
    rows = pl.concat([cost, use], how="diagonal_relaxed").group_by("worker", *_GRAPH)
    graphs = rows.agg(
        pl.col("captures", "all_times", "dummy_replays").sum(),
        pl.col("capture_sec").sum(),
        # A graph may have been cleared and captured again.
        pl.col("cuda_graphs", "memory_bytes").drop_nulls().last(),
        pl.col("captured_at").min(),
        pl.col("launch_sec").sum(),
        gpu_sec=pl.when(pl.col("gpu_sec").count() > 0).then(pl.col("gpu_sec").sum()),
    ).with_columns(replays=pl.col("all_times") - pl.col("dummy_replays"))
    return graphs.join(
        _computed(ran), on=["worker", *DESCRIPTOR, "part"], how="left", nulls_equal=True
    ).with_columns(
        all_replays=pl.col("replays").sum().over(_GRAPH),
        all_dummies=pl.col("dummy_replays").sum().over(_GRAPH),
        pays_for_pool=pl.col("captured_at")
        == pl.col("captured_at").min().over("worker", "part", "runtime_mode"),
    )


def _computed(ran: pl.DataFrame) -> pl.DataFrame:
    """``tokens`` and ``padding`` that each graph of the model computed for requests."""
    tokens, executions = pl.col("unpadded_tokens"), pl.col("executions")
    served = ran.filter(~pl.col("dummy") & pl.col("in_graph"))
    return served.group_by("worker", *DESCRIPTOR, part=pl.lit("model")).agg(
        tokens=(tokens * executions).sum(),
        padding=((pl.col("num_tokens") - tokens).clip(0) * executions).sum(),
    )


def _graphs(known: pl.DataFrame) -> Iterator[Graph]:
    merged = known.group_by(_GRAPH).agg(
        pl.col("captures", "cuda_graphs", "memory_bytes", "capture_sec").max(),
        pl.col("replays", "dummy_replays", "all_times", "launch_sec").sum(),
        *(
            pl.when(pl.col(name).count() > 0).then(pl.col(name).sum()).alias(name)
            for name in ("tokens", "padding", "gpu_sec")
        ),
        workers=pl.len().cast(pl.Int64),
        pays_for_pool=pl.col("pays_for_pool").any(),
    )
    order = pl.struct(-pl.col("replays"), -pl.col("dummy_replays"))
    for row in merged.sort(order, *_GRAPH).iter_rows(named=True):
        of_model, times = row["part"] in (None, "model"), row["all_times"]
        yield Graph(
            mode=row["runtime_mode"],
            num_tokens=row["num_tokens"],
            num_reqs=row["num_reqs"],
            uniform=None if row["uniform"] is None else row["uniform"] > 0,
            has_lora=None if row["has_lora"] is None else row["has_lora"] > 0,
            part=row["part"],
            source=row["source"],
            workers=row["workers"],
            captures=row["captures"],
            cuda_graphs=row["cuda_graphs"],
            memory_bytes=row["memory_bytes"],
            capture_sec=row["capture_sec"],
            pays_for_pool=bool(row["pays_for_pool"]),
            replays=row["replays"],
            dummy_replays=row["dummy_replays"],
            tokens=(row["tokens"] or 0) if of_model else None,
            padding=(row["padding"] or 0) if of_model else None,
            launch_us=1e6 * row["launch_sec"] / times if times else None,
            gpu_us=1e6 * row["gpu_sec"] / times if times and row["gpu_sec"] is not None else None,
        )


_COSTLIEST = ("memory_bytes", "capture_sec", "graphs")


def _total(rows: pl.DataFrame) -> Total:
    """The cost of these graphs on the worker where they cost most."""
    by_worker = rows.group_by("worker").agg(
        pl.col("cuda_graphs", "capture_sec").sum(),
        graphs=pl.len().cast(pl.Int64),
        memory_bytes=pl.when(pl.col("memory_bytes").count() > 0).then(pl.col("memory_bytes").sum()),
    )
    if not by_worker.height:
        return Total(None, 0, 0, None, 0.0)
    order = [*(pl.col(name) for name in _COSTLIEST), -pl.col("worker")]
    costliest = by_worker.sort(order, nulls_last=False).row(-1, named=True)
    return Total(**{field.name: costliest[field.name] for field in fields(Total)})


def _profiling(captured: pl.DataFrame) -> Total:
    trials = captured.filter(pl.col("kind") == "profiling")
    return _total(trials.rename({"num_graphs": "cuda_graphs", "duration_sec": "capture_sec"}))


def _unused(unused: pl.DataFrame, block: int | None) -> Unused:
    every, others = _total(unused), _total(unused.filter(~pl.col("pays_for_pool")))

    def blocks(total: Total) -> int | None:
        if not block or (total.memory_bytes is None and total.graphs):
            return None
        return (total.memory_bytes or 0) // block

    return Unused(
        never=_total(unused.filter(pl.col("all_dummies") == 0)),
        dummy_only=_total(unused.filter(pl.col("all_dummies") > 0)),
        more_blocks=blocks(others),
        more_blocks_most=blocks(every),
    )


def _estimate(start_up: StartUp | None, known: pl.DataFrame, block: int | None) -> Estimate | None:
    """What the worker that decides had reserved; None where no worker recorded it."""
    if start_up is None:
        return None
    on_worker = known.filter(pl.col("worker") == start_up.worker)
    captured = _total(on_worker if start_up.worker is not None else known).memory_bytes
    estimated, applied = start_up.graphs_estimated_bytes, start_up.graphs_estimate_applied
    took = captured if start_up.graphs_bytes is None else start_up.graphs_bytes
    is_known = estimated is not None and took is not None
    off = (estimated or 0) - (took or 0)
    return Estimate(
        worker=start_up.worker,
        estimated_bytes=estimated,
        applied=applied,
        measured_bytes=start_up.graphs_bytes,
        captured_bytes=captured,
        ratio=estimated / took if estimated and took else None,
        blocks=int(off / block) if is_known and applied and block else None,
    )


def _mode(group: tuple[tuple[Any, ...], pl.DataFrame]) -> str:
    return str(group[0][0] or "")
