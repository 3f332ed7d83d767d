# SPDX-License-Identifier: Apache-2.0
"""A fleet as a page of its own: a row a replica, no script, nothing from a network."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from string import Template
from urllib.parse import quote

from analysis.fleet.merging import Fleet, Group, One
from analysis.fleet.outliers import FEWEST
from analysis.renderers.html.elements import text
from analysis.renderers.html.frame import asset, policy
from analysis.wording import fleet as words
from analysis.wording.formats import number, share


def render(found: Fleet, reports: Mapping[str, str] | None = None) -> str:
    """The page.

    Args:
        found: the fleet.
        reports: where the report of a session is, by the session's path, as seen from the page.

    """
    return Template(asset("fleet.html")).substitute(
        policy=policy(),
        title=text(words.title(found)),
        recorded=text(_recorded(found)),
        tiles="\n".join(_tile(*one) for one in _tiles(found)),
        replicas=_replicas(found, reports or {}),
        outliers=_outliers(found),
        by=text(found.by),
        groups=_groups(found),
        routing=_routing(found),
        bill=_bill(found.whole),
        doubtful=_listed(
            "Sessions to look at",
            ((one.origin.path, said) for one in found.sessions if (said := words.state(one))),
        ),
        doubles=_listed(
            "Sessions that are there twice, and count once",
            ((one.path, f"the same as {one.same_as}") for one in found.doubles),
        ),
        failed=_listed(
            "Sessions that could not be read", ((one.path, one.reason) for one in found.failed)
        ),
    )


def _recorded(found: Fleet) -> str:
    figures, counts = found.whole.figures, found.whole.counts
    said = (
        f"{words.hours(figures.recorded_hours)} recorded, {number(counts.ended)} requests ended, "
        f"{number(counts.prompt_tokens)} tokens of prompts and {number(counts.output_tokens)} of "
        "answers."
    )
    window = words.windows(found)
    return said if window is None else f"{said} {window}"


def _tiles(found: Fleet) -> Iterator[tuple[str, str, str]]:
    """The figures to remember: label, figure, and what there is to say of it."""
    figures, routing = found.whole.figures, found.routing
    yield "hit rate", share(figures.hit_rate), "of prompt tokens"
    if routing.joined:
        yield "with perfect routing", share(routing.perfect_routing), "hit rate"
        yield "with one shared cache", share(routing.shared_cache), "hit rate"
    yield "computed again: evicted", share(figures.eviction_tax), "of all tokens"
    yield "computed again: preempted", share(figures.preemption_tax), "of all tokens"
    yield "KV cache held", share(figures.usage), "mean over time"
    yield "first token", words.quantile(figures.first_token_p50), "half of the requests"
    yield "first token, 95 %", words.quantile(figures.first_token_p95), "of the requests"


def _tile(label: str, figure: str, more: str) -> str:
    return (
        f"<div><dt>{text(label)}<br><small>{text(more)}</small></dt><dd>{text(figure)}</dd></div>"
    )


_HEADS = ("requests", "hit rate", "evicted", "preempted", "held", "in queue, 95 %", "first token")
_MEASURES = (None, "hit_rate", "eviction_tax", "preemption_tax", "usage", "queue_p95", None)
"""By which a replica may stand out in the column."""


def _replicas(found: Fleet, reports: Mapping[str, str]) -> str:
    sessions: dict[tuple[str, str], list[One]] = {}
    for one in found.sessions:
        place = (one.origin.deployment or "", one.origin.replica)
        sessions.setdefault(place, []).append(one)
    odd: dict[tuple[str, str], set[str]] = {}
    for each in found.outliers:
        odd.setdefault((each.deployment or "", each.replica), set()).add(each.measure)
    rows = []
    for group in found.replicas:
        place = (group.deployment or "", group.name)
        name = _linked(group, sessions[place], reports)
        rows.append(_row(name, group, odd.get(place, set())))
    return _table(("replica", *_HEADS, *_costs(found.whole)), rows)


def _linked(group: Group, sessions: Sequence[One], reports: Mapping[str, str]) -> str:
    """The replica's name, with a link to the report of its last session, and to those before."""
    known = [one for one in sessions if one.origin.path in reports]
    known.sort(key=lambda one: (one.origin.started_at or "", one.origin.path), reverse=True)
    name = text(group.name)
    if known:
        name = _link(reports[known[0].origin.path], name)
    more = [text(each) for each in (group.deployment, group.model) if each]
    more += [_link(reports[one.origin.path], text(one.origin.session_id)) for one in known[1:]] or (
        [f"{len(sessions)} sessions"] if len(sessions) > 1 else []
    )
    return name + "".join(f"<small>{each}</small>" for each in more)


def _link(where: str, name: str) -> str:
    # A path need not be UTF-8.
    return f'<a href="{text(quote(os.fsencode(where)))}">{name}</a>'


def _groups(found: Fleet) -> str:
    rows = [_row(text(group.name), group, set()) for group in found.groups]
    return _table((found.by, *_HEADS, *_costs(found.whole)), rows)


def _costs(whole: Group) -> tuple[str, ...]:
    return () if whole.bill is None else tuple(item.name for item in whole.bill.items)


def _row(name: str, group: Group, odd: set[str]) -> str:
    figures = group.figures
    first = (figures.first_token_p50, figures.first_token_p95)
    cells = [
        number(group.counts.ended),
        share(figures.hit_rate),
        share(figures.eviction_tax),
        share(figures.preemption_tax),
        share(figures.usage),
        words.quantile(figures.queue_p95),
        " / ".join(map(words.quantile, first)),
    ]
    attributes = [' class="odd"' if measure in odd else "" for measure in _MEASURES]
    if odd & {"first_token_p50", "duration_p50"}:
        attributes[-1] = ' class="odd"'
    if "requests_per_sec" in odd:
        attributes[0] = ' class="odd"'
    kind = "held odd" if "usage" in odd else "held"
    attributes[4] = f' class="{kind}" style="--share:{100 * (figures.usage or 0):.2f}%"'
    if group.bill is not None:
        cells += [words.amount(item.cost) for item in group.bill.items]
        attributes += [""] * len(group.bill.items)
    shown = "".join(
        f"<td{attribute}>{text(cell)}</td>"
        for cell, attribute in zip(cells, attributes, strict=True)
    )
    return f'<tr><th scope="row">{name}</th>{shown}</tr>'


def _table(heads: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in heads)
    listed = "\n".join(rows)
    return f"<thead><tr>{head}</tr></thead>\n<tbody>\n{listed}\n</tbody>"


def _outliers(found: Fleet) -> str:
    if not found.outliers:
        few = len(found.replicas) < FEWEST
        return f"<p>{text(words.TOO_FEW if few else words.ALL_ALIKE)}</p>"
    rows = "".join(f"<li>{text(words.standing_out(one))}</li>" for one in found.outliers)
    return f"<ul>{rows}</ul>"


def _routing(found: Fleet) -> str:
    said = "".join(f"<p>{text(sentence)}</p>" for sentence in words.routing(found.routing))
    if not found.routing.replicas:
        return said
    rows = [
        f'<tr><th scope="row">{text(one.replica)}</th><td>{number(one.routed_tokens)}</td>'
        f"<td>{number(one.shared_tokens)}</td></tr>"
        for one in found.routing.replicas
    ]
    heads = ("replica", "tokens lost to routing", "tokens lost to apart caches")
    return f'{said}<div class="wide" tabindex="0"><table>{_table(heads, rows)}</table></div>'


def _bill(whole: Group) -> str:
    bill = whole.bill
    if bill is None:
        return ""
    rows = [
        f'<tr><th scope="row">{text(item.name)}</th><td>{words.amount(item.cost)}</td>'
        f"<td>{text(words.arithmetic(bill, item))}</td></tr>"
        for item in bill.items
    ]
    heads = ("derived", "cost", "how it came about")
    return (
        f"<h2>What waste cost</h2><p>{words.amount(bill.gpu_hours)} GPU-hours x "
        f"{bill.gpu_hour:g} = {words.amount(bill.cost)} in all. {text(words.DERIVED)}</p>"
        f'<div class="wide" tabindex="0"><table class="text">{_table(heads, rows)}</table></div>'
    )


def _listed(heading: str, found: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<li><code>{text(path)}</code>: {text(said)}</li>" for path, said in found)
    return f"<h2>{text(heading)}</h2><ul>{rows}</ul>" if rows else ""
