# SPDX-License-Identifier: Apache-2.0
"""The whole summary as text for people: 80 columns, with colour where rich and a terminal are.

``screen`` has the short one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from analysis.renderers.text.layout import Line, section, wrapped
from analysis.renderers.text.painting import paint, plain
from analysis.renderers.text.sections import (
    advice,
    allocations,
    blame,
    by_whom,
    cuda_graphs,
    evictions,
    experts,
    families,
    findings,
    fragmentation,
    gpu_time,
    graph_ledger,
    head_room,
    holders,
    memory,
    misses,
    preemptions,
    prefix_cache,
    rent,
    requests,
    scheduling,
    session,
    sharing,
    story,
    usage,
    waiting,
)
from analysis.summary import About, Summary
from analysis.wording import sections as headings
from analysis.wording.printable import shortened
from analysis.wording.run_totals import HEADING
from analysis.wording.session import MORE, more, paused, removed, unfinished, warm_up

_TITLE = 65


def write(summary: Summary, out: TextIO) -> None:
    """Print the summary."""
    paint(lambda bar: layout(summary, bar), out)


def render(summary: Summary) -> str:
    """The summary as plain text."""
    return plain(lambda bar: layout(summary, bar))


def layout(summary: Summary, bar: str) -> Iterator[Line]:
    """The summary's lines."""
    yield from header(summary)
    yield from section(headings.FOUND, findings.lines(summary))
    yield from section(headings.ADVICE, advice.lines(summary))
    yield from section(headings.IN_SHORT, story.lines(summary))
    yield from section(headings.SESSION, session.lines(summary))
    yield from section(HEADING, session.whole_run(summary))
    yield from section(headings.USAGE, _usage(summary, bar))
    yield from section(headings.HOLDERS, holders.lines(summary.holders))
    yield from section(headings.BLOCKS, allocations.lines(summary.allocations))
    yield from section(
        headings.PREFIX_CACHE,
        prefix_cache.lines(
            summary.prefix_cache, summary.external, summary.conversations, summary.facts
        ),
    )
    yield from section(headings.MISSES, misses.lines(summary.misses, summary.facts))
    yield from section(headings.FAMILIES, families.lines(summary.families))
    yield from section(headings.SHARING, sharing.lines(summary.sharing))
    yield from section(headings.EVICTIONS, evictions.lines(summary))
    yield from section(headings.BLAME, blame.lines(summary.blame, summary.evictions))
    yield from section(headings.REQUESTS, requests.lines(summary))
    yield from section(headings.SCHEDULING, _scheduling(summary))
    yield from section(headings.WAITING, waiting.lines(summary.waiting, summary.facts.scheduler))
    yield from section(headings.BY_WHOM, by_whom.lines(summary.by_whom))
    yield from section(
        headings.PREEMPTIONS, preemptions.lines(summary.preemptions, summary.admission)
    )
    yield from section(headings.HEAD_ROOM, head_room.lines(summary.head_room))
    yield from section(headings.RENT, rent.lines(summary.rent))
    yield from section(
        headings.GRAPHS, cuda_graphs.lines(summary.cuda_graphs, summary.capture_sizes)
    )
    yield from section(headings.LEDGER, graph_ledger.lines(summary.graph_ledger))
    yield from section(headings.MEMORY, memory.lines(summary.memory))
    yield from section(headings.GPU_TIME, gpu_time.lines(summary.gpu_time))
    yield from section(headings.EXPERTS, experts.lines(summary.experts))
    yield from section(headings.PROFILING, session.profiling(summary.cost))


def _scheduling(summary: Summary) -> Iterator[Line]:
    yield from scheduling.lines(summary.scheduling, summary.facts.scheduler.policy)


def _usage(summary: Summary, bar: str) -> Iterator[Line]:
    yield from usage.lines(summary.usage, bar)
    yield from fragmentation.lines(summary.fragmentation)


def header(summary: Summary) -> Iterator[Line]:
    """Which session it is, how far it goes, and what is wrong with the recording."""
    yield from _about(summary.session)
    for warning in summary.warnings:
        yield from wrapped("Warning: ", warning, "warning", "warning")


def _about(about: About) -> Iterator[Line]:
    yield (("profilemate  ", "label"), (shortened(about.session_id, _TITLE), "title"))
    yield ((about.directory, "label"),)
    if about.state != "complete":
        yield from wrapped(f"{unfinished(about.state)}: ", about.note or "", "warning", "")
    elif about.note:
        yield from wrapped("Note: ", about.note, "warning", "")
    if (period := paused(about)) is not None:
        yield from wrapped("Paused: ", f"{period}.", "warning", "")
    if (left := removed(about)) is not None:
        yield from wrapped("Window: ", f"{left}.", "warning", "")
    if (left_out := warm_up(about)) is not None:
        yield from wrapped("Warm-up left out: ", left_out, "warning", "")
    if about.siblings:
        yield from wrapped(MORE, more(about.siblings), "warning", "")
