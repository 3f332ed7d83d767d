# SPDX-License-Identifier: Apache-2.0
"""A page's elements as HTML. Every text is escaped here, whoever wrote it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from analysis.judgement import findings as judged
from analysis.renderers.html.chart import Bars, Chart, Section, Table
from analysis.renderers.html.key_figures import KeyFigure
from analysis.summary import Advice, Summary
from analysis.wording.advice import known, none, setting
from analysis.wording.findings import NOTHING, all_right, sentence
from analysis.wording.printable import printable
from analysis.wording.run_totals import HEADING
from analysis.wording.session import Fact

_ZOOM = (
    ("in", "+", "Zoom in"),
    ("out", "−", "Zoom out"),
    ("left", "←", "Earlier"),
    ("right", "→", "Later"),
    ("reset", "Reset", "Reset the zoom"),
)


def text(value: str) -> str:
    """Text as it may stand between tags and in attributes; a figure stays with its sign."""
    return html.escape(printable(value)).replace(" %", "&nbsp;%")


def prose(value: str) -> str:
    """Text between tags, in which no line ends within a flag."""
    return _FLAG.sub(r'<span class="flag">\g<0></span>', text(value))


_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def paragraphs(sentences: Iterable[str], kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return "\n".join(f"<p{attribute}>{prose(sentence)}</p>" for sentence in sentences)


def figures(found: Iterable[KeyFigure]) -> str:
    """The tiles: a program finds each by its key, with its value at full precision."""
    tiles = (
        f'<div><dd data-key="{text(figure.key)}" data-value="{json.dumps(figure.value)}">'
        f"{text(figure.text)}</dd><dt>{text(figure.label)}</dt></div>"
        for figure in found
    )
    return "\n".join(tiles)


def findings(summary: Summary) -> str:
    """What was found, the costliest first, and what is fine."""
    fine = all_right(judged.fine(summary))
    found = "".join(f"<li>{prose(sentence(finding))}</li>" for finding in summary.findings)
    listed = f"<ul>{found}</ul>" if found else f"<p>{text(NOTHING)}</p>"
    return listed + (f"\n<p>{text(fine)}</p>" if fine else "")


def advice(summary: Summary) -> str:
    """The advice, numbered; or that there is none."""
    if not summary.advice:
        return f"<p>{text(none(summary.findings, summary.warnings))}</p>"
    return "<ol>\n" + "\n".join(map(_advice, summary.advice)) + "\n</ol>"


def _advice(one: Advice) -> str:
    change = setting(one.flag, one.value)
    flag = f"<p><code>{text(change)}</code></p>" if change else ""
    because = "".join(f"<li>{prose(evidence)}</li>" for evidence in one.evidence)
    return (
        f"<li><h3>{prose(one.says)}</h3>{flag}<p>Because</p><ul>{because}</ul>"
        f"<p>Expect: {prose(one.expect)}</p><p>Confidence: {text(one.confidence)}</p>"
        f"<p>How known: {prose(known(one))}</p></li>"
    )


def links(sections: Iterable[Section]) -> str:
    return "\n".join(
        f'<a href="#{section.key}">{text(section.heading)}</a>' for section in sections
    )


def section(found: Section) -> str:
    return (
        f'<section id="{found.key}" aria-labelledby="{found.key}-heading">\n'
        f'<h2 id="{found.key}-heading">{text(found.heading)}</h2>\n'
        + "\n".join(map(chart, found.charts))
        + "\n</section>"
    )


def chart(drawn: Chart) -> str:
    return "\n".join(_chart(drawn))


def _chart(drawn: Chart) -> Iterator[str]:
    yield f'<figure id="{drawn.key}" aria-labelledby="{drawn.key}-heading">'
    yield f'<h3 id="{drawn.key}-heading">{text(drawn.heading)}</h3>'
    if drawn.figure is None:
        yield f'<p class="nothing">{text(drawn.words)}</p>\n</figure>'
        return
    yield f'<p class="look">{text(drawn.look)}</p>'
    if isinstance(drawn.figure, Bars):
        yield from _bars(drawn.figure)
    else:
        yield _controls(drawn)
        yield (
            f'<div class="plot" data-chart="{drawn.key}" style="height:{drawn.height}px" '
            f'role="img" aria-label="{text(drawn.heading)}" '
            f'aria-describedby="{drawn.key}-words"></div>'
        )
    yield f'<figcaption id="{drawn.key}-words">{text(drawn.words)}</figcaption>'
    if drawn.table is not None:
        yield f"<details><summary>Figures</summary>\n{table(drawn.table)}\n</details>"
    yield "</figure>"


def _bars(content: Bars) -> Iterator[str]:
    """Bars as a list: each has its label and its figure as text."""
    if len(content.segments) > 1:
        keys = "".join(
            f'<li><i style="background:var(--{segment.colour})"></i>{text(segment.name)}</li>'
            for segment in content.segments
        )
        yield f'<ul class="keys">{keys}</ul>'
    totals = [
        sum(values)
        for values in zip(*(segment.values for segment in content.segments), strict=True)
    ]
    longest = max([*totals, content.mark or 0]) or 1
    mark = ""
    if content.mark is not None:
        mark = f'<b style="left:{100 * content.mark / longest:.2f}%"></b>'
    yield '<ul class="bars">'
    for index, (label, figure) in enumerate(zip(content.labels, content.texts, strict=True)):
        segments = "".join(
            f'<i style="width:{100 * segment.values[index] / longest:.2f}%;'
            f'background:var(--{segment.colour})"></i>'
            for segment in content.segments
        )
        yield (
            f"<li><span>{text(label)}</span> <span>{text(figure)}</span>"
            f'<div aria-hidden="true">{segments}{mark}</div></li>'
        )
    yield "</ul>"
    yield f'<p class="unit">{text(content.unit)}</p>'


def _controls(drawn: Chart) -> str:
    of = text(drawn.heading)
    buttons = "".join(
        f'<button type="button" data-zoom="{name}" aria-label="{label}: {of}" title="{label}">'
        f"{sign}</button>"
        for name, sign, label in _ZOOM
    )
    return f'<div class="zoom" role="group" aria-label="Zoom: {of}">{buttons}</div>'


def table(content: Table) -> str:
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in content.head)
    rows = "\n".join(_row(cells) for cells in content.rows)
    # A table wider than a phone scrolls by itself, by keyboard too.
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of figures"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _row(cells: Sequence[str]) -> str:
    first, *rest = (text(cell) for cell in cells)
    return f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{c}</td>" for c in rest) + "</tr>"


def facts(known: Iterable[Fact]) -> str:
    return "\n".join(
        f"<div><dt>{text(fact.label)}</dt>"
        f"<dd>{text(f'{fact.value} {fact.remark}'.strip())}</dd></div>"
        for fact in known
    )


def whole_run(known: Sequence[Fact]) -> str:
    """The section of the whole run; nothing where nothing is known."""
    if not known:
        return ""
    return (
        '<section id="whole-run" aria-labelledby="whole-run-heading">\n'
        f'<h2 id="whole-run-heading">{text(HEADING)}</h2>\n'
        f'<dl class="facts">\n{facts(known)}\n</dl>\n</section>'
    )


def data(sections: Iterable[Section]) -> str:
    """The figures as JSON that may stand in a script element: no tag can begin in it."""
    content: dict[str, Any] = {
        drawn.key: {**drawn.figure, "overTime": drawn.over_time}
        for found in sections
        for drawn in found.charts
        if isinstance(drawn.figure, dict)
    }
    plain = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
