# SPDX-License-Identifier: Apache-2.0
"""The summary as text for people: 80 columns, with colour where rich and a terminal are there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from analysis.renderers.text.layout import Line, section, wrapped
from analysis.renderers.text.painting import paint, plain
from analysis.renderers.text.sections import (
    advice,
    allocations,
    blame,
    cuda_graphs,
    evictions,
    families,
    fragmentation,
    graph_ledger,
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
from analysis.wording.run_totals import HEADING
from analysis.wording.session import MORE, more, paused, removed, unfinished, warm_up


def write(summary: Summary, out: TextIO) -> None:
    """Print the summary."""
    paint(lambda bar: layout(summary, bar), out)


def render(summary: Summary) -> str:
    """The summary as plain text."""
    return plain(lambda bar: layout(summary, bar))


def layout(summary: Summary, bar: str) -> Iterator[Line]:
    """The summary's lines."""
    yield from _header(summary.session)
    for warning in summary.warnings:
        yield from wrapped("Warning: ", warning, "warning", "warning")
    yield from section("In short", story.lines(summary))
    yield from section("Advice", advice.lines(summary.advice))
    yield from section("Session", session.lines(summary))
    yield from section(HEADING, session.whole_run(summary))
    yield from section("KV cache usage, weighted by time", _usage(summary, bar))
    yield from section("Who holds blocks", holders.lines(summary.holders))
    yield from section("Blocks", allocations.lines(summary.allocations))
    yield from section("Prefix cache", prefix_cache.lines(summary.prefix_cache, summary.facts))
    yield from section("Why the prefix cache missed", misses.lines(summary.misses, summary.facts))
    yield from section("Shared prefixes", families.lines(summary.families))
    yield from section("Reuse and working set", sharing.lines(summary.sharing))
    yield from section("Evictions", evictions.lines(summary))
    yield from section("Who evicted what was needed", blame.lines(summary.blame, summary.evictions))
    yield from section("Requests", requests.lines(summary))
    yield from section("Scheduling", scheduling.lines(summary.scheduling))
    yield from section(
        "Why requests waited", waiting.lines(summary.waiting, summary.facts.scheduler)
    )
    yield from section(
        "The preemption bill", preemptions.lines(summary.preemptions, summary.admission)
    )
    yield from section("KV rent", rent.lines(summary.rent))
    yield from section("CUDA graphs", cuda_graphs.lines(summary.cuda_graphs, summary.capture_sizes))
    yield from section("The graph ledger", graph_ledger.lines(summary.graph_ledger))
    yield from section("GPU memory", memory.lines(summary.memory))
    yield from section("Profiling", session.profiling(summary.cost))


def _usage(summary: Summary, bar: str) -> Iterator[Line]:
    yield from usage.lines(summary.usage, bar)
    yield from fragmentation.lines(summary.fragmentation)


def _header(about: About) -> Iterator[Line]:
    yield (("profilemate  ", "label"), (about.session_id, "title"))
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
