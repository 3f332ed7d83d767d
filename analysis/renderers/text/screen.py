# SPDX-License-Identifier: Apache-2.0
"""The summary on one screen of 80 columns and 40 lines: what was found, advice, key figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TextIO

from analysis.renderers.text import summary as whole
from analysis.renderers.text.layout import Line, note, row, section
from analysis.renderers.text.painting import paint, plain
from analysis.renderers.text.sections import advice, by_whom, findings
from analysis.summary import Summary
from analysis.wording import sections as headings
from analysis.wording.advice import none
from analysis.wording.findings import NOTHING
from analysis.wording.formats import counted, percent, seconds, share

HEIGHT = 39
"""Lines. The prompt takes the last one of the screen."""

_FIRST = 20
"""Lines by whose end everything stands that was found, or that there is more."""
_ABOUT = 9
"""Lines of the header, warnings included."""


def write(summary: Summary, out: TextIO) -> None:
    """Print the screen."""
    paint(lambda bar: layout(summary, bar), out)


def render(summary: Summary) -> str:
    """The screen as plain text."""
    return plain(lambda bar: layout(summary, bar))


def layout(summary: Summary, bar: str) -> Iterator[Line]:
    """The screen's lines; there are no bars among them."""
    top = list(_cut([list(whole.header(summary))[:2], *_each(whole.header(summary))], _ABOUT))
    fine = list(findings.what_is_fine(summary))
    room = _FIRST - len(top) - 2 - len(fine)
    found = list(_cut([list(findings.one(each)) for each in summary.findings], room))
    top += section(headings.FOUND, [*(found or note(NOTHING)), *fine])
    bottom = [*section("Key figures", _figures(summary)), (), *note(_MORE)]
    room = HEIGHT - len(top) - len(bottom) - 2
    parts = [list(advice.what(number, one)) for number, one in enumerate(summary.advice, 1)]
    advised = list(_cut(parts, room)) or note(none(summary.findings, summary.warnings))
    yield from top
    yield from section(headings.ADVICE, advised)
    yield from bottom


_MORE = "The reasons for the advice, and all sections: the same command with --full"


def _each(header: Iterable[Line]) -> Iterator[list[Line]]:
    """The header's lines after the session's name and folder, a part each."""
    return ([line] for line in list(header)[2:])


def _cut(parts: list[list[Line]], room: int) -> Iterator[Line]:
    """As many parts as there is room for, each as a whole, and how many are left out."""
    left = len(parts)
    for part in parts:
        # The last one needs no line after it.
        if len(part) > room - (left > 1):
            yield from note(f"... and {left:,} more: --full")
            return
        yield from part
        room -= len(part)
        left -= 1


def _figures(summary: Summary) -> Iterator[Line]:
    scheduling, usage = summary.scheduling, summary.usage.combined
    first, end = scheduling.first_token.p50_sec, scheduling.finish.p50_sec
    took = "" if end is None else f"half of them within {seconds(end)}"
    took += "" if first is None else f", the first token within {seconds(first)}"
    yield from row("Requests", f"{summary.requests.ended:,} ended", took)
    if usage is not None and usage.mean_pct is not None:
        over = None if usage.bands is None else usage.bands.over_90
        yield from row(
            "KV cache held",
            f"{percent(usage.mean_pct)} on average",
            f"{percent(usage.peak_pct)} at the peak, over 90 % for {share(over)} of the time",
        )
    true = summary.prefix_cache.true
    if true.query_tokens:
        ceiling = summary.misses.ceiling
        most = "" if ceiling is None else f"a pool of any size: {share(ceiling)}"
        yield from row("Hit rate", f"{share(true.token_rate)} of prompt tokens", most)
    yield from by_whom.in_short(summary.by_whom)
    half = summary.lifetimes.lifetime.p50_sec
    lived = "" if half is None else f"half of those for room lived less than {seconds(half)}"
    yield from row("Evictions", counted(summary.evictions.total.blocks, "block"), lived)
    covered = summary.cuda_graphs.execution_share
    if covered is not None:
        yield from row("In CUDA graphs", f"{share(covered)} of executions")
