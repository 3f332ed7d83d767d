# SPDX-License-Identifier: Apache-2.0
"""Which capture sizes would have served the batches of this session best?"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from analysis.gpu import executions
from analysis.gpu.captures import MODEL, sizes, without_trials
from analysis.gpu.executions import NONE
from analysis.stats.quantiles import of_time
from analysis.tables.facts import Facts

COLUMNS = ("timestamp_sec", "scheduled_tokens", "prefill_tokens", "repeats")
"""Of scheduler_steps.csv."""


@dataclass(frozen=True)
class Fit:
    """How a list of ``sizes`` (tokens, ascending) serves the batches.

    A batch is padded to the next size; one beyond the largest size runs eagerly. ``executions``
    and ``tokens``: those in a graph, with their shares of all batches, from 0 to 1. ``padding``:
    tokens that graphs compute and nobody asked for; ``padding_share``: of all that they compute.
    """

    sizes: tuple[int, ...]
    executions: int
    execution_share: float
    tokens: int
    token_share: float
    padding: int
    padding_share: float


@dataclass(frozen=True)
class DecodeGap:
    """Batches of decodes that no FULL graph can hold: the next size has room for more requests
    than ``max_num_seqs``, or there is none.

    They have ``from_tokens`` to ``to_tokens``. ``add``: the size that would hold them all, None
    where their sizes differ so much that one size would mostly pad. ``executions``: how many of
    these sizes ran. ``ran``: how most of them did, in ``PIECEWISE`` graphs or eagerly (``NONE``).
    ``decode_steps``: steps of the scheduler with decodes alone and so many tokens, None where no
    steps were recorded.
    """

    add: int | None
    from_tokens: int
    to_tokens: int
    executions: int
    ran: str
    decode_steps: int | None


@dataclass(frozen=True)
class CaptureSizes:
    """``executions`` and ``tokens`` that were looked at: those that ran in a graph, or were too
    large for any.

    ``step``: 1 plus the speculative tokens; sizes are multiples of it, so that batches of decodes
    fit. ``decode_tokens``: the largest batch of decodes, max_num_seqs requests of ``step`` tokens.
    ``largest_tokens``: today's largest size or ``decode_tokens``, whichever is more; larger batches
    may run eagerly. ``off_step``: sizes of today's list that are no multiple of ``step``.

    ``for_coverage``: the size up to which 90 % of the executions would have a graph, a multiple of
    16 as vLLM's own; None where today's sizes reach as far.

    ``today``: the sizes that were captured. ``least_padding``: at most as many sizes, with the
    least padding for all batches up to ``largest_tokens``. ``fewest``: a shortest list that covers
    what today's covers and pads no more, None where there is none.
    """

    executions: int
    tokens: int
    step: int
    decode_tokens: int | None
    largest_tokens: int
    off_step: tuple[int, ...]
    for_coverage: int | None
    today: Fit
    least_padding: Fit | None
    fewest: Fit | None
    decode_gap: DecodeGap | None


class DecodeStepTally:
    """Counts the steps that scheduled decodes alone, by their tokens."""

    def __init__(self) -> None:
        self._parts: list[pl.DataFrame] = []

    def add(self, batch: pl.DataFrame) -> None:
        decodes = batch.filter((pl.col("scheduled_tokens") > 0) & (pl.col("prefill_tokens") == 0))
        steps = pl.col("repeats").fill_null(1).sum()
        self._parts.append(decodes.group_by(tokens="scheduled_tokens").agg(steps=steps))

    def between(self, least: int, most: int) -> int | None:
        """How many such steps had so many tokens; None where no step was recorded."""
        if not self._parts:
            return None
        rows = pl.concat(self._parts).filter(pl.col("tokens").is_between(least, most))
        return int(rows["steps"].sum())


def measure(
    facts: Facts,
    configured: Sequence[int],
    captured: pl.DataFrame,
    ran: pl.DataFrame,
    decodes: DecodeStepTally,
) -> CaptureSizes | None:
    """The sizes that would have served the batches; None without any size or any execution.

    Args:
        facts: of the session.
        configured: capture sizes; they count as today's where no capture was recorded.
        captured: what ``analysis.gpu.captures.read`` returns.
        ran: what ``analysis.gpu.executions.read`` returns.
        decodes: a tally that has seen all steps.

    """
    today = sorted(set(sizes(captured)["num_tokens"].to_list())) or list(configured)
    if not today:
        return None
    every = (
        executions.observed(ran)
        .filter(pl.col("in_graph") | (pl.col("unpadded_tokens") > today[-1]))
        .group_by(tokens="unpadded_tokens")
        .agg(pl.col("executions").sum())
        .sort("tokens")
    )
    batches = [(tokens, times) for tokens, times in every.iter_rows() if tokens]
    if not batches:
        return None
    step = 1 + (facts.scheduler.speculative_tokens or 0)
    seqs, limit = facts.scheduler.max_num_seqs, facts.scheduler.max_num_batched_tokens
    decode = None if seqs is None else seqs * step
    largest = max(today[-1], decode or 0)
    fits = _fit(today, batches)
    rules = _Rules(step, decode or 0, min(largest, limit or largest))
    as_many = _chosen(batches, rules, len(today))
    now = _Rules(step, decode or 0, min(today[-1], limit or today[-1]))
    fewest = _chosen(batches, now, len(today), enough=fits.padding)
    return CaptureSizes(
        executions=sum(times for _, times in batches),
        tokens=sum(tokens * times for tokens, times in batches),
        step=step,
        decode_tokens=decode,
        largest_tokens=rules.largest,
        off_step=tuple(size for size in today if size % step),
        for_coverage=_for_coverage(batches, today[-1], step),
        today=fits,
        least_padding=None if as_many is None else _fit(as_many, batches),
        fewest=None if fewest is None else _fit(fewest, batches),
        decode_gap=_decode_gap(captured, ran, decodes, rules),
    )


def _for_coverage(batches: Sequence[tuple[int, int]], largest: int, step: int) -> int | None:
    reached = of_time([(float(tokens), times) for tokens, times in batches], 90)
    if reached is None or reached <= largest:
        return None
    unit = math.lcm(16, step)
    return math.ceil(reached / unit) * unit


_NARROW = 8
"""One size can hold batches that differ by an eighth of their size at most."""

_Batches = Sequence[tuple[int, int]]
"""Pairs of tokens and how many executions had so many, by tokens."""


def _fit(sizes: Sequence[int], batches: _Batches) -> Fit:
    covered = [(tokens, times) for tokens, times in batches if tokens <= sizes[-1]]
    computed = sum(sizes[bisect_left(sizes, tokens)] * times for tokens, times in covered)
    executed, tokens = _added(covered)
    all_executed, all_tokens = _added(batches)
    return Fit(
        sizes=tuple(sizes),
        executions=executed,
        execution_share=executed / all_executed,
        tokens=tokens,
        token_share=tokens / all_tokens,
        padding=computed - tokens,
        padding_share=(computed - tokens) / computed if computed else 0.0,
    )


def _added(batches: _Batches) -> tuple[int, int]:
    return sum(times for _, times in batches), sum(tokens * times for tokens, times in batches)


@dataclass(frozen=True)
class _Rules:
    """Sizes are multiples of ``step``, and cover batches of up to ``largest`` tokens.

    They may pad no batch of up to ``decode`` tokens beyond these: vLLM captures no FULL graph
    there.
    """

    step: int
    decode: int
    largest: int


@dataclass(frozen=True)
class _Choice:
    """The best choice of so many sizes."""

    padding: int
    sizes: tuple[int, ...]


def _chosen(
    batches: _Batches, rules: _Rules, most: int, *, enough: int | None = None
) -> tuple[int, ...] | None:
    """The fewest sizes, ``most`` at most, that pad no more than ``enough`` tokens.

    Without ``enough`` they pad as little as possible. None where no choice does, or where there is
    no batch to cover.
    """
    points = _points(batches, rules)
    small = _best([point for point in points if point[0] <= rules.decode], most)
    large = _best([point for point in points if point[0] > rules.decode], most)
    best: _Choice | None = None
    for count in range(1, most + 1):
        for few in range(count + 1):
            ours, theirs = small.get(few), large.get(count - few)
            if ours is None or theirs is None:
                continue
            padding = ours.padding + theirs.padding
            if best is None or padding < best.padding:
                best = _Choice(padding, ours.sizes + theirs.sizes)
        if best is not None and best.padding <= (enough or 0):
            break
    if best is None or not best.sizes or (enough is not None and best.padding > enough):
        return None
    return best.sizes


def _points(batches: _Batches, rules: _Rules) -> list[tuple[int, int, int]]:
    """The sizes to choose from, each with the executions and tokens that it fits closest.

    No other size can be better: one between two of these pads all batches below it more than the
    lower one does.
    """
    points: dict[int, tuple[int, int]] = {}
    for tokens, times in batches:
        if tokens <= rules.largest:
            size = -(-tokens // rules.step) * rules.step
            executed, computed = points.get(size, (0, 0))
            points[size] = executed + times, computed + tokens * times
    return [(size, *of_size) for size, of_size in sorted(points.items())]


def _best(points: Sequence[tuple[int, int, int]], most: int) -> dict[int, _Choice]:
    """For each number of sizes up to ``most``, the choice with the least padding.

    Dynamic programming: the least padding of the first j points with k sizes, the last of which
    is point j, is the minimum over i < j of that of the first i with k - 1 sizes, and
    ``size[j] * (executions i to j) - (tokens i to j)``. For each k that is a minimum of lines at
    growing positions, which a queue of the lines' lower envelope gives in linear time (the convex
    hull trick; slopes fall, as executions are positive).
    """
    if not points:
        return {0: _Choice(0, ())}
    executed, tokens = [0], [0]
    for _, times, computed in points:
        executed.append(executed[-1] + times)
        tokens.append(tokens[-1] + computed)
    every = range(1, len(points) + 1)
    least = sum(size * times - computed for size, times, computed in points)
    padding: dict[int, int] = {0: 0}
    parents: list[dict[int, int]] = []
    found: dict[int, _Choice] = {}
    for count in range(1, min(most, len(points)) + 1):
        lines: deque[tuple[int, int, int]] = deque()
        now: dict[int, int] = {}
        before: dict[int, int] = {}
        for j in every:
            if j - 1 in padding:
                _add_line(lines, (-executed[j - 1], padding[j - 1] + tokens[j - 1], j - 1))
            if not lines:
                continue
            size = points[j - 1][0]
            while len(lines) > 1 and _at(lines[1], size) <= _at(lines[0], size):
                lines.popleft()
            now[j] = size * executed[j] - tokens[j] + _at(lines[0], size)
            before[j] = lines[0][2]
        parents.append(before)
        padding = now
        found[count] = _Choice(now[len(points)], _traced(points, parents))
        if now[len(points)] == least:
            break
    return found


def _at(line: tuple[int, int, int], position: int) -> int:
    return line[0] * position + line[1]


def _add_line(lines: deque[tuple[int, int, int]], line: tuple[int, int, int]) -> None:
    """Add a line with a lower slope than all others. Remove those that are now lowest nowhere."""
    while len(lines) > 1:
        (slope_a, begin_a, _), (slope_b, begin_b, _) = lines[-2], lines[-1]
        # Where line meets a is no later than where b does.
        if (line[1] - begin_a) * (slope_a - slope_b) > (begin_b - begin_a) * (slope_a - line[0]):
            break
        lines.pop()
    lines.append(line)


def _traced(
    points: Sequence[tuple[int, int, int]], parents: Sequence[dict[int, int]]
) -> tuple[int, ...]:
    """The sizes of the best choice, found from the last one back."""
    chosen: list[int] = []
    j = len(points)
    for before in reversed(parents):
        chosen.append(points[j - 1][0])
        j = before[j]
    return tuple(reversed(chosen))


def _decode_gap(
    captured: pl.DataFrame, ran: pl.DataFrame, decodes: DecodeStepTally, rules: _Rules
) -> DecodeGap | None:
    """Where decodes have FULL graphs of their own, vLLM 0.32 captures one for each size up to
    max_num_seqs x (1 + speculative tokens): CudagraphDispatcher.initialize_cudagraph_keys, and
    CudaGraphManager._init_candidates for the model runner V2."""
    for_decodes = without_trials(captured).filter(
        MODEL & (pl.col("runtime_mode") == "FULL") & (pl.col("uniform") > 0)
    )
    largest = for_decodes["num_tokens"].max()
    most = min(rules.decode, rules.largest) // rules.step * rules.step
    if not isinstance(largest, int) or largest >= most:
        return None
    first = (largest // rules.step + 1) * rules.step
    tokens, is_full = pl.col("unpadded_tokens"), pl.col("runtime_mode") == "FULL"
    rows = executions.observed(ran).filter(
        tokens.is_between(first, most) & (tokens % rules.step == 0) & ~is_full
    )
    if not rows.height:
        return None
    by_mode = (
        rows.group_by(mode=pl.when("in_graph").then("runtime_mode").otherwise(pl.lit(NONE)))
        .agg(pl.col("executions").sum())
        .sort("executions", "mode")
    )
    return DecodeGap(
        add=most if _NARROW * (most - first) <= most else None,
        from_tokens=first,
        to_tokens=most,
        executions=int(rows["executions"].sum()),
        ran=by_mode["mode"][-1],
        decode_steps=decodes.between(first, most),
    )
