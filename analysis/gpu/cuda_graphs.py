# SPDX-License-Identifier: Apache-2.0
"""How much ran in CUDA graphs, how much of that was padding, and why did the rest run eagerly?

Dummy executions (warm-up at start-up, idle data-parallel ranks) are counted, and left out of all
else. Ranks that compute the same batch (tensor and pipeline parallel) count one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import polars as pl

from analysis.gpu import executions
from analysis.gpu.executions import NONE
from analysis.stats.quantiles import of_time
from analysis.tables.metadata import flag, listed, part, parts, text, whole
from analysis.tables.session import Session

SHOWN = 5
"""How many of the batches that matter most are named."""

Reason = Literal[
    "not_replayed",
    "asked_none",
    "resolved_none",
    "not_captured",
    "too_large",
    "decode_only",
    "other",
]
"""Why an execution had no graph: the first of these that is true.

``not_replayed``: vLLM chose a graph, and replayed none. ``asked_none``: the configuration asks for
no graphs. ``resolved_none``: it asks for some, and vLLM resolved the mode to none.
``not_captured``: the worker captured none. ``too_large``: the batch is larger than the worker's
largest graph. ``decode_only``: the mode has graphs for batches of decodes alone, so this batch
probably had a prompt in it. ``other``: for example a data-parallel rank that runs eagerly since
another one must.
"""


@dataclass(frozen=True)
class Setup:
    """The configuration of CUDA graphs, and its effect, on the first worker that recorded it.

    ``device``: ``cuda``, ``cpu`` or another, None where it is not known. ``asked`` and
    ``resolved``: vLLM's ``cudagraph_mode`` as configured, and as the attention backends allow it.
    ``runner``: the model runner, ``V1`` or ``V2``. ``capture_sizes`` and ``max_capture_size``: as
    configured, in tokens. ``gpu_timing``: whether times on the GPU were measured.
    """

    device: str | None
    asked: str | None
    resolved: str | None
    attention_backends: tuple[str, ...]
    runner: str | None
    capture_sizes: tuple[int, ...]
    max_capture_size: int | None
    gpu_timing: bool | None


@dataclass(frozen=True)
class ModeUse:
    """Executions in one mode: ``FULL``, ``PIECEWISE`` or ``NONE`` (eager; also those that vLLM
    chose a graph for and replayed none).

    ``tokens``: unpadded. ``padding``: tokens that the graphs computed beyond these. The shares are
    of all executions and of all unpadded tokens, from 0 to 1. ``launch_us``: mean time that an
    execution spent in its replays on the host, None for ``NONE``. ``gpu_us``: mean time on the
    GPU, None where it was not measured.
    """

    mode: str
    executions: int
    execution_share: float
    tokens: int
    token_share: float | None
    padding: int
    launch_us: float | None
    gpu_us: float | None


@dataclass(frozen=True)
class Batch:
    """Executions with so many unpadded ``tokens``."""

    tokens: int
    executions: int


@dataclass(frozen=True)
class Eager:
    """Executions without a graph for one reason.

    ``execution_share``: of all executions, from 0 to 1. ``tokens``: of all these executions.
    ``smallest_tokens``, ``p50_tokens`` (median) and ``largest_tokens``: their sizes. ``most``:
    their commonest sizes.
    """

    reason: Reason
    executions: int
    execution_share: float
    tokens: int
    smallest_tokens: int
    p50_tokens: int
    largest_tokens: int
    most: tuple[Batch, ...]


@dataclass(frozen=True)
class SizePadding:
    """Executions that were padded to ``size`` tokens: ``full`` and ``piecewise`` ones.

    ``tokens``: unpadded. ``share``: padding, of all that these executions computed, from 0 to 1.
    """

    size: int
    executions: int
    full: int
    piecewise: int
    tokens: int
    padding: int
    share: float


@dataclass(frozen=True)
class PaddedBatch:
    """Executions of batches of ``tokens`` that were padded to ``size``, and the sum of their
    ``padding``."""

    tokens: int
    size: int
    executions: int
    padding: int


@dataclass(frozen=True)
class Padding:
    """``tokens`` that graphs computed and nobody asked for.

    ``share``: of all that graphs computed, from 0 to 1. ``by_size``: sorted by size. ``worst``:
    the batches with most padding.
    """

    tokens: int
    share: float | None
    by_size: tuple[SizePadding, ...]
    worst: tuple[PaddedBatch, ...]


@dataclass(frozen=True)
class WorkerUse:
    """One worker's executions. The shares are as in ``CudaGraphs`` and ``Padding``."""

    worker: int
    executions: int
    execution_share: float | None
    token_share: float | None
    padding_share: float | None


@dataclass(frozen=True)
class CudaGraphs:
    """``absent``: one sentence that says why there are no figures, None where there are.

    ``executions`` and their unpadded ``tokens``: without dummy ones. ``in_graphs`` and
    ``tokens_in_graphs``: those in a graph; ``execution_share`` and ``token_share``: the same as
    shares, from 0 to 1, None without an execution. ``eager``: by reason, the commonest first.
    """

    absent: str | None
    setup: Setup
    executions: int
    dummy_executions: int
    tokens: int
    in_graphs: int
    execution_share: float | None
    tokens_in_graphs: int
    token_share: float | None
    by_mode: tuple[ModeUse, ...]
    eager: tuple[Eager, ...]
    padding: Padding
    by_worker: tuple[WorkerUse, ...]


def measure(session: Session, ran: pl.DataFrame, sizes: pl.DataFrame) -> CudaGraphs:
    """How CUDA graphs were used.

    Args:
        session: the session.
        ran: what ``analysis.gpu.executions.read`` returns.
        sizes: what ``analysis.gpu.captures.sizes`` returns.

    """
    setup = _setup(session.metadata)
    rows = executions.observed(ran).with_columns(
        mode=pl.when("in_graph").then("runtime_mode").otherwise(pl.lit(NONE)),
        tokens=pl.col("unpadded_tokens") * pl.col("executions"),
        padding=pl.when("in_graph")
        .then((pl.col("num_tokens") - pl.col("unpadded_tokens")).clip(0) * pl.col("executions"))
        .otherwise(0),
    )
    graphs = rows.filter("in_graph")
    count, tokens = _sum(rows, "executions"), _sum(rows, "tokens")
    in_graphs, graph_tokens = _sum(graphs, "executions"), _sum(graphs, "tokens")
    return CudaGraphs(
        absent=None if count else _absent(session, setup, ran, sizes),
        setup=setup,
        executions=count,
        dummy_executions=_sum(ran.filter(pl.col("dummy") & pl.col("in_window")), "executions"),
        tokens=tokens,
        in_graphs=in_graphs,
        execution_share=_share(in_graphs, count),
        tokens_in_graphs=graph_tokens,
        token_share=_share(graph_tokens, tokens),
        by_mode=tuple(_by_mode(rows, count, tokens)),
        eager=_eager(rows, setup, sizes, count),
        padding=_padding(graphs),
        by_worker=tuple(_by_worker(rows)),
    )


def _setup(metadata: Mapping[str, Any]) -> Setup:
    entry = part(metadata, "cuda_graphs")
    backends = map(text, listed(entry.get("attention_backends")))
    configured = map(whole, listed(entry.get("capture_sizes")))
    return Setup(
        device=text(metadata.get("device")),
        asked=text(entry.get("asked")),
        resolved=text(entry.get("resolved")),
        attention_backends=tuple(backend for backend in backends if backend),
        runner=text(entry.get("runner")),
        capture_sizes=tuple(sorted({size for size in configured if size})),
        max_capture_size=whole(entry.get("max_capture_size")) or None,
        gpu_timing=flag(entry.get("gpu_timing")),
    )


def _absent(session: Session, setup: Setup, ran: pl.DataFrame, sizes: pl.DataFrame) -> str:
    """Why no execution is known."""
    metadata = session.metadata
    workers = [each for each in parts(metadata, "processes") if each.get("role") == "worker"]
    problem = next(
        (
            f"worker {worker.get('rank', '')}: {hook}: {reason}"
            for worker in workers
            for name in ("hooks_missing", "hooks_failed")
            for hook, reason in part(worker, name).items()
        ),
        None,
    )
    if sizes.height or ran.height:
        known = "graphs were captured" if sizes.height else "dummy batches were executed"
        since = " after the warm-up" if session.begin_sec else ""
        if session.window is not None:
            since = " in what is left of the run"
        return f"Nothing was executed for a request{since}: {known}, and none has served one."
    if setup.device is None and not part(metadata, "cuda_graphs"):
        return "Not recorded: this session does not say on which device it ran."
    if setup.device not in (None, "cuda"):
        where = "the CPU" if setup.device == "cpu" else ascii(setup.device)
        return f"There are none: the engine ran on {where}."
    if problem is not None:
        return f"Not recorded: a hook could not be attached ({problem})."
    if setup.asked == NONE:
        return "None were asked for (--enforce-eager, or cudagraph_mode NONE), and nothing ran."
    if not workers:
        return "Not recorded: no worker process recorded anything."
    return "Nothing was captured or executed."


def _by_mode(rows: pl.DataFrame, count: int, tokens: int) -> list[ModeUse]:
    found = rows.group_by("mode").agg(
        pl.col("executions", "tokens", "padding", "launch_us", "gpu_us", "gpu_timed").sum()
    )
    return [
        ModeUse(
            mode=row["mode"],
            executions=row["executions"],
            execution_share=row["executions"] / count,
            tokens=row["tokens"],
            token_share=_share(row["tokens"], tokens),
            padding=row["padding"],
            launch_us=None if row["mode"] == NONE else row["launch_us"] / row["executions"],
            gpu_us=row["gpu_us"] / row["gpu_timed"] if row["gpu_timed"] else None,
        )
        for row in found.sort(pl.col("mode") == NONE, "mode").iter_rows(named=True)
    ]


def _eager(rows: pl.DataFrame, setup: Setup, sizes: pl.DataFrame, count: int) -> tuple[Eager, ...]:
    largest = sizes.group_by("worker").agg(largest=pl.col("num_tokens").max())
    resolved = setup.resolved or setup.asked
    known = pl.lit(setup.max_capture_size, pl.Int64)
    reason = (
        pl.when(pl.col("runtime_mode") != NONE)
        .then(pl.lit("not_replayed"))
        .when(pl.lit(setup.asked == NONE))
        .then(pl.lit("asked_none"))
        .when(pl.lit(resolved == NONE))
        .then(pl.lit("resolved_none"))
        .when(pl.col("largest").is_null() & ~pl.col("has_graphs"))
        .then(pl.lit("not_captured"))
        .when(pl.col("unpadded_tokens") > pl.coalesce("largest", known))
        .then(pl.lit("too_large"))
        .when(pl.lit(resolved == "FULL_DECODE_ONLY"))
        .then(pl.lit("decode_only"))
        .otherwise(pl.lit("other"))
    )
    eager = (
        rows.with_columns(has_graphs=pl.col("in_graph").any().over("worker"))
        .filter(~pl.col("in_graph"))
        .join(largest, on="worker", how="left")
        .group_by("unpadded_tokens", reason=reason)
        .agg(pl.col("executions", "tokens").sum())
    )
    found = [
        _one_reason(name, part.sort("unpadded_tokens"), count)
        for (name,), part in eager.group_by("reason")
    ]
    return tuple(sorted(found, key=lambda eager: (-eager.executions, eager.reason)))


def _one_reason(name: Any, rows: pl.DataFrame, count: int) -> Eager:
    batches = rows.select("unpadded_tokens", "executions").rows()
    executed = _sum(rows, "executions")
    commonest = sorted(batches, key=lambda batch: (-batch[1], batch[0]))[:SHOWN]
    return Eager(
        reason=name,
        executions=executed,
        execution_share=executed / count,
        tokens=_sum(rows, "tokens"),
        smallest_tokens=batches[0][0],
        p50_tokens=int(of_time(batches, 50) or 0),
        largest_tokens=batches[-1][0],
        most=tuple(Batch(tokens, times) for tokens, times in commonest),
    )


def _padding(graphs: pl.DataFrame) -> Padding:
    padding, tokens = _sum(graphs, "padding"), _sum(graphs, "tokens")
    by_size = graphs.group_by(size="num_tokens").agg(
        pl.col("executions", "tokens", "padding").sum(),
        full=pl.col("executions").filter(pl.col("mode") == "FULL").sum(),
        piecewise=pl.col("executions").filter(pl.col("mode") == "PIECEWISE").sum(),
    )
    batches = (
        graphs.group_by(tokens="unpadded_tokens", size="num_tokens")
        .agg(pl.col("executions", "padding").sum())
        .filter(pl.col("padding") > 0)
        .sort("padding", "tokens", "size", descending=[True, False, False])
    )
    return Padding(
        tokens=padding,
        share=_share(padding, padding + tokens),
        by_size=tuple(
            SizePadding(**row, share=_share(row["padding"], row["padding"] + row["tokens"]) or 0.0)
            for row in by_size.sort("size").iter_rows(named=True)
        ),
        worst=tuple(PaddedBatch(**row) for row in batches.head(SHOWN).iter_rows(named=True)),
    )


def _by_worker(rows: pl.DataFrame) -> list[WorkerUse]:
    in_graph = pl.col("in_graph")
    found = rows.group_by("worker").agg(
        pl.col("executions", "tokens", "padding").sum(),
        in_graphs=pl.col("executions").filter(in_graph).sum(),
        graph_tokens=pl.col("tokens").filter(in_graph).sum(),
    )
    return [
        WorkerUse(
            worker=row["worker"],
            executions=row["executions"],
            execution_share=_share(row["in_graphs"], row["executions"]),
            token_share=_share(row["graph_tokens"], row["tokens"]),
            padding_share=_share(row["padding"], row["padding"] + row["graph_tokens"]),
        )
        for row in found.sort("worker").iter_rows(named=True)
    ]


def _sum(rows: pl.DataFrame, column: str) -> int:
    return int(rows[column].sum())


def _share(part_of: int, whole_of: int) -> float | None:
    return part_of / whole_of if whole_of else None
