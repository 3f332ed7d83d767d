# SPDX-License-Identifier: Apache-2.0
"""How long did steps take on the GPU, by what they computed: prompts, answers or both?

A step's time on the GPU is from the first of its work to the last, gaps in between included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from analysis.stats.spread import Spread, spread
from analysis.tables.metadata import part, text
from analysis.tables.phases import PHASE, PHASES
from analysis.tables.session import Session

TABLE = "gpu_steps"


@dataclass(frozen=True)
class PhaseTime:
    """The steps of one phase (``analysis.tables.phases.PHASES``), of all workers.

    ``prefill_tokens`` and ``decode_tokens``: of all of them together. ``gpu_sec``: of those that
    were timed; ``share``: of the GPU time of all phases, None without any. ``step``: the times of
    single steps, in seconds.
    """

    phase: str
    steps: int
    prefill_tokens: int
    decode_tokens: int
    gpu_sec: float
    share: float | None
    step: Spread


@dataclass(frozen=True)
class EncoderTime:
    """What a multimodal model's encoder took of that: ``steps`` that gave ``items`` to it. Times
    are as in ``PhaseTime``."""

    steps: int
    items: int
    gpu_sec: float
    share: float | None
    step: Spread


@dataclass(frozen=True)
class GpuTime:
    """``steps``: of all ``workers`` together, each with its own GPU; ``timed`` of them have their
    time, ``gpu_sec`` together. ``busy_share``: of the workers' time, from 0 to 1; None without a
    worker. ``by_phase``: the phases that had a step, as ``PHASES`` has them. ``encoder``: None
    where no step gave anything to an encoder. ``problem``: why nothing was timed, or not all; None
    where all was, or nothing was asked for.
    """

    workers: int
    steps: int
    timed: int
    gpu_sec: float
    busy_share: float | None
    by_phase: tuple[PhaseTime, ...]
    encoder: EncoderTime | None
    problem: str | None


def measure(session: Session) -> GpuTime:
    """What the workers timed after the warm-up.

    Raises:
        SessionError: the table cannot be read.

    """
    rows = session.collect(
        TABLE,
        lambda table: table.select(
            "worker",
            "prefill_tokens",
            "decode_tokens",
            "encoder_items",
            phase=PHASE,
            gpu_sec=pl.col("gpu_us") / 1e6,
            encoder_sec=pl.col("encoder_us") / 1e6,
        ),
    )
    workers = rows["worker"].n_unique()
    gpu_sec = float(rows["gpu_sec"].sum())
    elapsed = workers * (session.end_sec - session.begin_sec)
    by_phase = {
        phase: found for (phase,), found in rows.partition_by("phase", as_dict=True).items()
    }
    return GpuTime(
        workers=workers,
        steps=rows.height,
        timed=rows["gpu_sec"].count(),
        gpu_sec=gpu_sec,
        busy_share=min(1.0, gpu_sec / elapsed) if elapsed else None,
        by_phase=_by_phase(by_phase, gpu_sec),
        encoder=_encoder(rows.filter(pl.col("encoder_items") > 0), gpu_sec),
        problem=text(part(session.metadata, "phases").get("problem")),
    )


def _by_phase(found: Mapping[str, pl.DataFrame], total: float) -> tuple[PhaseTime, ...]:
    return tuple(
        PhaseTime(
            phase=phase,
            steps=rows.height,
            prefill_tokens=int(rows["prefill_tokens"].sum()),
            decode_tokens=int(rows["decode_tokens"].sum()),
            gpu_sec=gpu_sec,
            share=gpu_sec / total if total else None,
            step=spread(rows["gpu_sec"].drop_nulls()),
        )
        for phase in PHASES
        if (rows := found.get(phase)) is not None
        for gpu_sec in [float(rows["gpu_sec"].sum())]
    )


def _encoder(rows: pl.DataFrame, total: float) -> EncoderTime | None:
    if rows.is_empty():
        return None
    gpu_sec = float(rows["encoder_sec"].sum())
    return EncoderTime(
        steps=rows.height,
        items=int(rows["encoder_items"].sum()),
        gpu_sec=gpu_sec,
        share=gpu_sec / total if total else None,
        step=spread(rows["encoder_sec"].drop_nulls()),
    )
