# SPDX-License-Identifier: Apache-2.0
"""Where prompts that begin alike part."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.prefix.families import TooShort
from analysis.renderers.html.chart import Bars, Chart, Segment, Table
from analysis.renderers.html.report import Report
from analysis.wording.formats import share
from analysis.wording.printable import abridged


def charts(report: Report) -> Iterator[Chart]:
    heading = "Where do prompts that begin alike part?"
    look = (
        "What differs early (a time, a name) keeps everything after it from being shared: move it "
        "to the end of the prompt."
    )
    found = report.summary.families
    if not found.largest:
        nothing = "No prompt begins with 16 or more tokens of an earlier one."
        yield Chart("families", heading, look, nothing)
        return
    labels = [
        f"after their first {family.shared_tokens:,} tokens, {family.continuations:,} ways"
        for family in found.largest
    ]
    requests = [family.requests for family in found.largest]
    shared = share(found.shared_tokens / found.prompt_tokens if found.prompt_tokens else None)
    short = "" if found.too_short is None else _too_short(found.too_short)
    yield Chart(
        "families",
        heading,
        look,
        f"{found.sharing:,} of {found.requests:,} prompts begin as an earlier one does, with "
        f"{shared} of all prompt tokens.{short} Drawn: "
        "the families with the most tokens after the place where they part.",
        Bars(
            labels,
            [f"{count:,} prompts" for count in requests],
            [Segment("requests", requests, "held")],
            "prompts of the family",
        ),
        Table(
            ("Share the first", "part before", "prompts", "ways", "tokens after", "one of them"),
            [
                (
                    f"{family.shared_tokens:,}",
                    f"{family.part_before:,}",
                    f"{family.requests:,}",
                    f"{family.continuations:,}",
                    f"{family.tokens_after:,}",
                    abridged(family.example),
                )
                for family in found.largest
            ],
        ),
    )


def _too_short(short: TooShort) -> str:
    return (
        f" {short.requests:,} of them share too little to be found: up to "
        f"{short.longest_tokens:,} tokens, where a hit takes {short.unit:,}."
    )
