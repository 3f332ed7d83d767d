# SPDX-License-Identifier: Apache-2.0
"""What pools of other sizes would have found."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import Chart, Figure, Table, axis, line, rounded
from analysis.renderers.html.report import Report
from analysis.whatif.curve import BELADY, LRU, Curve, Point
from analysis.wording.formats import share
from analysis.wording.miss_ratio_curve import sentences

HEADING = "Would a larger pool find more?"
LOOK = (
    "Where the upper line still falls to the right of your pool (dotted), more blocks find more; "
    "where it is flat, none do. The gap down to the lower line is what evicting other blocks could "
    "save, if the future were known."
)


def charts(report: Report) -> Iterator[Chart]:
    found = report.series.miss_ratio_curve
    if found.curve is None or not found.curve.enough_blocks:
        problem = found.problem or "no request has a full block in common with an earlier one"
        nothing = f"The miss-ratio curve is left out: {problem}."
        yield Chart("miss-ratio-curve", HEADING, LOOK, nothing)
    else:
        yield _curve(found.curve)


def _curve(found: Curve) -> Chart:
    sizes = [point.pool.num_blocks for point in found.points]
    least = rounded(None if found.ceiling.hit_rate is None else 100 * (1 - found.ceiling.hit_rate))
    shapes: list[Figure] = []
    if found.at_measured is not None:
        own = found.at_measured.pool.num_blocks
        mark = {"color": "var(--held)", "width": 1.5, "dash": "dot"}
        shapes.append(
            {"type": "line", "x0": own, "x1": own, "y0": 0, "y1": 1, "yref": "paper", "line": mark}
        )
    data = [
        line("LRU, vLLM's rule", sizes, [_missed(point, LRU) for point in found.points], "held"),
        line("at best", sizes, [_missed(point, BELADY) for point in found.points], "cached"),
        line("no pool misses less", sizes, [least] * len(sizes), "green", line={"dash": "dash"}),
    ]
    return Chart(
        "miss-ratio-curve",
        HEADING,
        LOOK,
        " ".join([*sentences(found), *found.notes]),
        {
            "data": data,
            "layout": {
                "xaxis": axis("blocks in the pool", type="log", dtick="D2"),
                "yaxis": axis("% of prompt tokens not found", range=[0, 100]),
                "shapes": shapes,
            },
        },
        Table(
            ("Blocks", "of now", "hit rate under LRU", "at best", "evictions under LRU"),
            [_row(point) for point in found.points],
        ),
    )


def _missed(point: Point, policy: str) -> float | None:
    outcome = point.outcome(policy)
    rate = outcome.hit_rate if outcome else None
    return None if rate is None else 100 * (1 - rate)


def _row(point: Point) -> tuple[str, ...]:
    lru, best = point.outcome(LRU), point.outcome(BELADY)
    return (
        f"{point.pool.num_blocks:,}",
        "" if point.pool.factor is None else f"{point.pool.factor:.2f}x",
        share(lru.hit_rate if lru else None),
        share(best.hit_rate if best else None),
        f"{lru.evictions:,}" if lru and lru.evictions is not None else "n/a",
    )
