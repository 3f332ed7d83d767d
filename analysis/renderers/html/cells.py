# SPDX-License-Identifier: Apache-2.0
"""A session and its summary as HTML for a notebook, which brings its own style sheet."""

from __future__ import annotations

from collections.abc import Iterable

from analysis.judgement.story import sentences
from analysis.renderers.html import elements, key_figures
from analysis.renderers.html.chart import Table
from analysis.summary import Summary
from analysis.tables import facts as facts_of
from analysis.tables.metadata import text
from analysis.tables.schema import TABLES
from analysis.tables.session import Session
from analysis.wording.formats import seconds


def of_summary(summary: Summary) -> str:
    """What happened, what was found, the advice in a line each, and the figures to remember."""
    advice = [one.says for one in summary.advice]
    rows = [(figure.label, figure.text) for figure in key_figures.figures(summary)]
    warnings = [f"Warning: {warning}." for warning in summary.warnings]
    parts = [
        _heading(summary.session.session_id),
        elements.paragraphs(warnings),
        elements.paragraphs(sentences(summary)),
        "<h4>What was found</h4>",
        elements.findings(summary),
        *(["<h4>Advice</h4>", _listed(advice)] if advice else []),
        "<h4>Key figures</h4>",
        elements.table(Table(("", ""), rows)),
    ]
    return "\n".join(filter(None, parts))


def of_session(session: Session) -> str:
    """What ran, for how long, and which tables there are."""
    known = facts_of.read(session)
    there = [name for name in TABLES if session.has_table(name)]
    rows = [
        ("Folder", session.url or str(session.directory)),
        ("State", session.state),
        ("Note", session.note or ""),
        ("Model", known.model or "unknown"),
        ("Began", text(session.metadata.get("started_at")) or "unknown"),
        ("Lasted", seconds(session.end_sec)),
        ("Figures from", seconds(session.begin_sec) if session.begin_sec else ""),
        ("Versions", ", ".join(f"{name} {version}" for name, version in known.versions.items())),
        ("Tables", ", ".join(there) or "none"),
    ]
    table = elements.table(Table(("", ""), [row for row in rows if row[1]]))
    return f"{_heading(session.directory.name)}\n{table}"


def _heading(name: str) -> str:
    return f"<h3>{elements.text(name)}</h3>"


def _listed(lines: Iterable[str]) -> str:
    return f"<ol>{''.join(f'<li>{elements.prose(line)}</li>' for line in lines)}</ol>"
