# SPDX-License-Identifier: Apache-2.0
"""Why prompt tokens were not found in the cache."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import Bars, Chart, Segment
from analysis.renderers.html.report import Report
from analysis.wording.formats import share
from analysis.wording.misses import MEANINGS


def charts(report: Report) -> Iterator[Chart]:
    heading = "Why was the rest of the prompts not found?"
    look = (
        "Only what was evicted before comes back with a larger pool; new content does not, and "
        "prompts that part too early are mended where they are written."
    )
    missed = report.summary.misses
    if not missed.query_tokens:
        yield Chart("misses", heading, look, "No request was looked up and admitted.")
        return
    tokens = {
        "found in the cache": missed.hit_tokens,
        **{MEANINGS[reason]: part.tokens for reason, part in missed.by_reason.items()},
        "last block, not full": missed.partial_tokens,
    }
    words = (
        f"Of {missed.query_tokens:,} prompt tokens {missed.hit_tokens:,} were found. "
        f"{missed.recomputed_tokens:,} were computed again because they had been evicted for their "
        f"room, {share(missed.recomputed_share)} of all that were computed. A pool of any size "
        f"would have found at most {share(missed.ceiling)}."
    )
    yield Chart(
        "misses",
        heading,
        look,
        words,
        Bars(
            list(tokens),
            [f"{count:,} ({share(count / missed.query_tokens)})" for count in tokens.values()],
            [Segment("tokens", list(tokens.values()), "held")],
            "prompt tokens",
        ),
    )
