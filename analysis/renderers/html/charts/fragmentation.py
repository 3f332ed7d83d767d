# SPDX-License-Identifier: Apache-2.0
"""How much of the held blocks was empty, and would be in blocks of other sizes."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import Bars, Chart, Segment, Table
from analysis.renderers.html.report import Report
from analysis.wording.formats import share


def charts(report: Report) -> Iterator[Chart]:
    heading = "How much of the held blocks is empty?"
    look = (
        "A request's last block is partly empty: short requests in large blocks waste cache, and "
        "smaller blocks give it back."
    )
    found = report.summary.fragmentation
    if found is None or found.actual.share is None:
        nothing = (
            "Not known: no request ended with blocks, or the model has several KV cache groups."
        )
        yield Chart("fragmentation", heading, look, nothing)
        return
    known = [empty for empty in found.by_block_size if empty.share is not None]
    labels = [f"{empty.block_size} tokens a block" for empty in known]
    shares = [empty.share for empty in known]
    segments = [Segment("empty", [100 * (value or 0.0) for value in shares], "held")]
    yield Chart(
        "fragmentation",
        heading,
        look,
        f"With the session's blocks of {found.actual.block_size} tokens, "
        f"{share(found.actual.share)} of the slots in held blocks held no token. Drawn: what it "
        "would be for the same requests.",
        Bars(labels, [*map(share, shares)], segments, "% of slots without a token"),
        Table(
            ("Tokens a block", "empty at requests' ends", "over their lives"),
            [
                (f"{empty.block_size}", share(empty.at_end), share(empty.over_time))
                for empty in found.by_block_size
            ],
        ),
    )
