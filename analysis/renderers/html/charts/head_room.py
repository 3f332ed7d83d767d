# SPDX-License-Identifier: Apache-2.0
"""How many requests at once the pool has room for."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import Chart, Table, axis, count_axis, line
from analysis.renderers.html.report import Report
from analysis.wording.formats import share


def charts(report: Report) -> Iterator[Chart]:
    yield _head_room(report)


def _head_room(report: Report) -> Chart:
    heading = "How many requests at once is there room for?"
    look = (
        "Where the dotted line crosses the pool, one moment in a hundred needs more blocks than "
        "there are: more requests at once are preempted or wait."
    )
    room = report.summary.head_room.room
    if room is None:
        nothing = "No request ended, or its blocks cannot be told from its tokens."
        return Chart("head-room", heading, look, nothing)
    x = [crowd.requests for crowd in room.curve]
    fit = f"{room.most:,} or more" if room.fit is None else f"{room.fit:,}"
    dotted = {"line": {"dash": "dot", "width": 1.5}}
    return Chart(
        "head-room",
        heading,
        look,
        f"{fit} requests fit into the {room.pool_blocks:,} blocks but for 1 % of the time. At a "
        f"moment, a request holds {room.mean_blocks:,.1f} blocks on average. Estimated from "
        f"{room.requests:,} requests of this session.",
        {
            "data": [
                line("mean", x, [crowd.mean_blocks for crowd in room.curve], "held"),
                line("99 %", x, [crowd.p99_blocks for crowd in room.curve], "held", **dotted),
                line("the pool", [x[0], x[-1]], [room.pool_blocks] * 2, "regret"),
            ],
            "layout": {"xaxis": axis("requests at once"), "yaxis": count_axis("blocks")},
        },
        Table(
            ("Requests at once", "mean blocks", "99 % need", "do not fit", "preemptions a request"),
            [
                (
                    f"{crowd.requests:,}",
                    f"{crowd.mean_blocks:,.0f}",
                    f"{crowd.p99_blocks:,}",
                    share(crowd.over_share),
                    f"{crowd.preemptions:.3f}",
                )
                for crowd in room.curve
            ],
        ),
    )
