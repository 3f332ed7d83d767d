# SPDX-License-Identifier: Apache-2.0
"""A session as one HTML page: the story, then charts to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from string import Template

from analysis.judgement.story import sentences
from analysis.renderers.html import elements, key_figures
from analysis.renderers.html.chart import Chart, Section, begun_at, with_marks
from analysis.renderers.html.charts import (
    ages,
    blame,
    block_map,
    by_whom,
    capture_sizes,
    cuda_graphs,
    depths,
    evictions,
    experts,
    families,
    fragmentation,
    gpu_memory,
    graph_ledger,
    head_room,
    holders,
    miss_ratio_curve,
    misses,
    phases,
    preemptions,
    prefix_cache,
    rent,
    scheduling,
    sharing,
    start_up,
    steps,
    timeline,
    usage,
    waiting,
)
from analysis.renderers.html.frame import asset, framed
from analysis.renderers.html.report import Report
from analysis.series import Series
from analysis.summary import Summary
from analysis.wording import run_totals
from analysis.wording import session as words
from analysis.wording.formats import seconds
from profilemate.format.marks import Mark

Charts = Callable[[Report], Iterable[Chart]]


def render(summary: Summary, series: Series) -> str:
    """The page."""
    report = Report(summary, series)
    sections = sections_of(report)
    session = summary.session
    facts = [
        *words.facts(summary.facts, summary.usage, session.started_at, session.duration_sec),
        words.marks(session),
        words.cost(summary.cost),
    ]
    notes = [f"Warning: {warning}." for warning in summary.warnings]
    if session.state != "complete":
        notes.insert(0, f"{words.unfinished(session.state)}: {session.note or ''}")
    elif session.note:
        notes.insert(0, f"Note: {session.note}.")
    parts = filter(None, [words.paused(session), words.removed(session)])
    notes.extend(f"{part}." for part in parts)
    if session.siblings:
        notes.append(f"{words.MORE}{words.more(session.siblings)}.")
    content = Template(asset("page.html")).substitute(
        title=elements.text(session.session_id),
        directory=elements.text(session.directory),
        notes=elements.paragraphs(notes, "note"),
        story=elements.paragraphs(sentences(summary)),
        found=elements.findings(summary),
        advice=elements.advice(summary),
        begin=_begin(report),
        figures=elements.figures(key_figures.figures(summary)),
        sections="\n".join(elements.section(section) for section in sections),
        whole_run=elements.whole_run(list(run_totals.facts(summary))),
        facts=elements.facts(filter(None, facts)),
    )
    links = elements.links(sections) + '\n<a href="#about">About</a>'
    return framed(session.session_id, "Skip to the report", links, sections, content)


def _begin(report: Report) -> str:
    """A sentence where charts over time do not begin with the session."""
    begin = load_sec(report)
    if begin is None:
        return ""
    return (
        f" They begin with the first request, at {seconds(begin)}; zoom out for what came before."
    )


def sections_of(report: Report) -> list[Section]:
    """The page, top to bottom. A new chart is one more module, and its name here."""
    layout: tuple[tuple[str, str, tuple[Charts, ...]], ...] = (
        (
            "pool",
            "KV cache",
            (
                usage.charts,
                block_map.charts,
                holders.charts,
                fragmentation.charts,
                head_room.charts,
            ),
        ),
        (
            "prefix-cache",
            "Prefix cache",
            (
                prefix_cache.charts,
                depths.charts,
                misses.charts,
                miss_ratio_curve.charts,
                sharing.stretches,
                ages.charts,
                sharing.working_sets,
                families.charts,
            ),
        ),
        ("evictions", "Evictions", (evictions.charts, blame.charts)),
        (
            "requests",
            "Requests",
            (
                timeline.charts,
                waiting.charts,
                scheduling.charts,
                by_whom.charts,
                preemptions.charts,
                rent.charts,
            ),
        ),
        ("scheduler", "Scheduler", (steps.charts, phases.charts)),
        (
            "cuda-graphs",
            "CUDA graphs",
            (cuda_graphs.charts, capture_sizes.charts, graph_ledger.charts),
        ),
        ("gpu-memory", "GPU memory", (start_up.charts, gpu_memory.charts)),
        ("moe", "Experts", (experts.charts,)),
    )
    sections = (
        Section(key, heading, [chart for charts in drawn for chart in charts(report)])
        for key, heading, drawn in layout
    )
    bins, begin = report.series.bins, load_sec(report)
    marks = [mark for mark in report.summary.session.marks if mark.at_sec >= bins.begin_sec]
    return [
        replace(section, charts=[_finished(chart, begin, marks) for chart in section.charts])
        for section in sections
        if section.charts
    ]


def _finished(chart: Chart, begin_sec: float | None, marks: Sequence[Mark]) -> Chart:
    """The chart with a line at each moment that the user marked, from the first request on."""
    if begin_sec is not None:
        chart = begun_at(chart, begin_sec)
    return with_marks(chart, marks) if marks else chart


def load_sec(report: Report) -> float | None:
    """When charts over time begin, a little before the first request; None where that is the
    beginning."""
    bins, observed = report.series.bins, report.summary.usage.observed_sec
    if not observed:
        return None
    first = bins.end_sec - observed
    before = first - _MARGIN * observed - bins.begin_sec
    return bins.begin_sec + before if before > _IDLE * (bins.end_sec - bins.begin_sec) else None


_IDLE = 0.05
"""Of a chart's time, the share before the first request from which on it is left out."""
_MARGIN = 0.02
"""Of the time since then, the share that is shown before it."""
