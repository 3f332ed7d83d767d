# SPDX-License-Identifier: Apache-2.0
"""A session as one HTML page: the story, then charts to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from string import Template

from analysis.judgement.story import sentences
from analysis.renderers.html import (
    about,
    block_map,
    costs,
    cuda_graphs,
    evictions,
    families,
    fragmentation,
    graph_ledger,
    holders,
    key_figures,
    memory,
    miss_ratio_curve,
    misses,
    parts,
    pool,
    prefix_cache,
    regret,
    requests,
    reuse,
    steps,
    waiting,
)
from analysis.renderers.html.chart import Chart, Section
from analysis.renderers.html.frame import asset, framed
from analysis.renderers.html.report import Report
from analysis.series import Series
from analysis.summary import Summary

Charts = Callable[[Report], Iterable[Chart]]


def render(summary: Summary, series: Series) -> str:
    """The page."""
    report = Report(summary, series)
    sections = sections_of(report)
    session = summary.session
    notes = [f"Warning: {warning}." for warning in summary.warnings]
    if session.state != "complete":
        state = "Still running" if session.state == "running" else "Cut off"
        notes.insert(0, f"{state}: {session.note or ''}")
    content = Template(asset("page.html")).substitute(
        title=parts.text(session.session_id),
        directory=parts.text(session.directory),
        notes=parts.paragraphs(notes, "note"),
        story=parts.paragraphs(sentences(summary)),
        advice=parts.advice(summary.advice),
        figures=parts.figures(key_figures.figures(summary)),
        sections="\n".join(parts.section(section) for section in sections),
        facts=parts.facts(about.rows(summary)),
    )
    links = parts.links(sections) + '\n<a href="#about">About</a>'
    return framed(session.session_id, "Skip to the report", links, sections, content)


def sections_of(report: Report) -> list[Section]:
    """The page, top to bottom. A chart that is new is one more module, and its name here."""
    layout: tuple[tuple[str, str, tuple[Charts, ...]], ...] = (
        ("pool", "KV cache", (pool.charts, block_map.charts, holders.charts, fragmentation.charts)),
        (
            "prefix-cache",
            "Prefix cache",
            (
                prefix_cache.charts,
                misses.charts,
                miss_ratio_curve.charts,
                reuse.charts,
                families.charts,
            ),
        ),
        ("evictions", "Evictions", (evictions.charts, regret.charts)),
        ("requests", "Requests", (requests.charts, waiting.charts, costs.charts)),
        ("scheduler", "Scheduler", (steps.charts,)),
        ("cuda-graphs", "CUDA graphs", (cuda_graphs.charts, graph_ledger.charts)),
        ("gpu-memory", "GPU memory", (memory.charts,)),
    )
    sections = (
        Section(key, heading, [chart for charts in drawn for chart in charts(report)])
        for key, heading, drawn in layout
    )
    return [section for section in sections if section.charts]
