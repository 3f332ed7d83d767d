# SPDX-License-Identifier: Apache-2.0
"""A comparison as a page of its own: one table, no script, nothing from a network."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from string import Template

from analysis.judgement.comparison import NAMES, SAME, Comparison, Row, Setting
from analysis.judgement.measures import by_name
from analysis.renderers.html.frame import asset, policy
from analysis.summary import About
from analysis.wording import measures
from analysis.wording.printable import printable
from analysis.wording.session import window


def render(found: Comparison) -> str:
    """The page."""
    names = NAMES[: len(found.sessions)]
    return Template(asset("compare.html")).substitute(
        policy=policy(),
        title=f"Comparison of {len(names)} sessions",
        sessions="\n".join(map(_session, names, found.sessions)),
        doubts="\n".join(_doubts(found)),
        configuration=_configuration(found.configuration, names),
        heads="\n".join(_heads(names)),
        measures="\n".join(map(_measure, found.measures)),
        same=f"{100 * SAME:g}",
    )


def _text(text: str) -> str:
    """Whatever the text holds, it stays text."""
    return escape(printable(text))


def _session(name: str, about: About) -> str:
    length = window(about)
    baseline = ", the baseline" if name == NAMES[0] else ""
    return (
        f"<dt><b>{name}</b> {_text(about.session_id)}{baseline}</dt>"
        f"<dd><code>{_text(about.directory)}</code><br>{length}, {about.state}</dd>"
    )


def _doubts(found: Comparison) -> Iterator[str]:
    for name, doubts in zip(NAMES[1:], found.doubts, strict=False):
        if doubts:
            reasons = "".join(f"<li>{_text(doubt)}</li>" for doubt in doubts)
            yield (
                f'<div class="doubts"><p>{name} and {NAMES[0]} are not comparable, so no change '
                f"is called better or worse:</p><ul>{reasons}</ul></div>"
            )


def _configuration(settings: tuple[Setting, ...], names: str) -> str:
    if not settings:
        return f"<p>{measures.NOTHING_DIFFERS}</p>"
    heads = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = "\n".join(
        f'<tr><th scope="row">{_text(setting.name)}</th>'
        + "".join(f"<td>{_text(value or measures.NONE)}</td>" for value in setting.values)
        + "</tr>"
        for setting in settings
    )
    return (
        '<div class="wide" tabindex="0"><table class="text"><thead><tr><th scope="col">Setting'
        f"</th>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table></div>"
    )


def _heads(names: str) -> Iterator[str]:
    others = names[1:]
    changes = "".join(f'<th scope="colgroup" colspan="4">{name}</th>' for name in others)
    yield f'<tr><th></th><th scope="col">{names[0]}</th>{changes}</tr>'
    columns = "<th>value</th><th>change</th><th>%</th><th></th>" * len(others)
    yield f"<tr><th>Measure</th><th>value</th>{columns}</tr>"


def _measure(row: Row) -> str:
    first, *others = row.values
    cells = [measures.figure(first, row.unit)]
    for value, change in zip(others, row.changes, strict=True):
        cells += [
            measures.figure(value, row.unit),
            measures.change(change.absolute, change.relative, row.unit),
            measures.relative_change(change.absolute, change.relative),
            f'<span class="{change.verdict}">{change.verdict}</span>' if change.verdict else "",
        ]
    direction = f" {row.better.capitalize()} is better." if row.better else ""
    return (
        f'<tr><th scope="row">{row.name}<small>{_text(by_name(row.name).says)}{direction}</small>'
        "</th>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    )
