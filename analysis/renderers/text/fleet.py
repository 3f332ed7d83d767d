# SPDX-License-Identifier: Apache-2.0
"""A fleet as text: the whole, its groups, the replicas that stand out, and what waste cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from analysis.fleet.merging import Double, Failed, Fleet, Group
from analysis.fleet.outliers import FEWEST
from analysis.renderers.text.layout import WIDTH, Line, note, row, section, table, wrapped
from analysis.renderers.text.painting import paint, plain
from analysis.wording import fleet as words
from analysis.wording.formats import number, percent, share
from analysis.wording.printable import shortened

SHOWN = 30
"""So many groups, replicas that stand out, and sessions that failed are shown; JSON has all."""

LONGEST = 60
"""Characters of a name in a table, which is as wide as its longest; JSON and the page have all."""


def write(found: Fleet, out: TextIO) -> None:
    """Print the fleet."""
    paint(lambda _: _layout(found), out)


def render(found: Fleet) -> str:
    """The same as plain text."""
    return plain(lambda _: _layout(found))


def _layout(found: Fleet) -> Iterator[Line]:
    yield (("profilemate  ", "label"), (words.title(found), "title"))
    yield from section("The fleet", _whole(found))
    yield from section(f"By {found.by}", _groups(found.groups))
    yield from section("Replicas that stand out", _outliers(found))
    yield from section("What another replica had", _routing(found))
    yield from section("What waste cost", _bill(found.whole))
    yield from section("Sessions to look at", _doubtful(found))
    yield from section("Sessions that are there twice, and count once", _doubles(found.doubles))
    yield from section("Sessions that could not be read", _failed(found.failed))


def _whole(found: Fleet) -> Iterator[Line]:
    counts, figures = found.whole.counts, found.whole.figures
    yield from row("Recorded", words.hours(figures.recorded_hours), "all sessions together")
    yield from row(
        "Requests",
        f"{number(counts.ended)} ended",
        f"{number(counts.prompt_tokens)} tokens of prompts, "
        f"{number(counts.output_tokens)} of answers",
    )
    yield from row(
        "Hit rate",
        share(figures.hit_rate),
        f"of prompt tokens; {share(figures.request_hit_rate)} of requests found any",
    )
    yield from row(
        "Computed again",
        share(figures.eviction_tax),
        f"of all tokens as blocks were evicted, {share(figures.preemption_tax)} as requests were "
        "preempted",
    )
    yield from row(
        "KV cache held",
        share(figures.usage),
        f"on average; {share(figures.cached)} cached, {share(figures.free)} free; over 90 % for "
        f"{share(figures.over_90)} of the time",
    )
    yield from row(
        "Time in the queue",
        words.bounds(figures.queue_p50),
        f"half of the requests; 95 %: {words.bounds(figures.queue_p95)}",
    )
    yield from row(
        "First token",
        words.bounds(figures.first_token_p50),
        f"half of the requests; 95 %: {words.bounds(figures.first_token_p95)}",
    )
    yield from row(
        "End",
        words.bounds(figures.duration_p50),
        f"half of the requests; 95 %: {words.bounds(figures.duration_p95)}",
    )
    yield from row(
        "Evictions",
        f"{number(counts.evicted_blocks)} blocks",
        f"{percent(_never(found.whole))} never found; half lived less than "
        f"{words.bounds(figures.lifetime_p50)}",
    )
    window = words.windows(found)
    if window is not None:
        yield ()
        yield from note(window)


def _never(group: Group) -> float | None:
    counts = group.counts
    return (
        100 * counts.never_reused_blocks / counts.evicted_blocks if counts.evicted_blocks else None
    )


_HEADS = ("", "sessions", "requests", "hit rate", "evict.", "preempt.", "held", "first", "p95")


def _groups(groups: tuple[Group, ...]) -> Iterator[Line]:
    rows = [
        (
            shortened(group.name, LONGEST),
            number(group.counts.sessions),
            number(group.counts.ended),
            share(group.figures.hit_rate),
            share(group.figures.eviction_tax),
            share(group.figures.preemption_tax),
            share(group.figures.usage),
            words.quantile(group.figures.first_token_p50),
            words.quantile(group.figures.first_token_p95),
        )
        for group in groups[:SHOWN]
    ]
    yield from _named(rows)
    yield from _others(len(groups))
    yield ()
    yield from note(
        "evict., preempt.: tokens computed again because of these, of all tokens. first, p95: time "
        "to the first token, half and 95 % of the requests."
    )


def _named(rows: Sequence[tuple[str, ...]]) -> Iterator[Line]:
    """The table of groups. Where names make it too wide, each has a line of its own."""
    lines = list(table(_HEADS, rows))
    if all(sum(len(text) for text, _ in line) <= WIDTH for line in lines):
        yield from lines
        return
    head, *figures = table(_HEADS, [("", *cells) for _, *cells in rows])
    yield head
    for (name, *_), line in zip(rows, figures, strict=True):
        yield from wrapped("  ", name, "", "label")
        yield line


def _outliers(found: Fleet) -> Iterator[Line]:
    if not found.outliers:
        few = len(found.replicas) < FEWEST
        yield from note(words.TOO_FEW if few else words.ALL_ALIKE)
        return
    for one in found.outliers[:SHOWN]:
        yield from wrapped("  - ", words.standing_out(one), "warning", "")
    yield from _others(len(found.outliers))


def _routing(found: Fleet) -> Iterator[Line]:
    routing = found.routing
    if routing.joined:
        yield from row("As it was", share(routing.hit_rate), "hit rate")
        yield from row("Perfect routing", share(routing.perfect_routing))
        yield from row("One shared cache", share(routing.shared_cache))
        yield ()
    for sentence in words.routing(routing):
        yield from note(sentence)
    if routing.replicas:
        yield ()
        heads = ("", "lost to routing", "to apart caches")
        rows = [
            (shortened(one.replica, LONGEST), number(one.routed_tokens), number(one.shared_tokens))
            for one in routing.replicas[:SHOWN]
        ]
        yield from table(heads, rows)
        yield from _others(len(routing.replicas))


def _bill(whole: Group) -> Iterator[Line]:
    bill = whole.bill
    if bill is None:
        return
    yield from row(
        "All",
        words.amount(bill.cost),
        f"{words.amount(bill.gpu_hours)} GPU-hours x {bill.gpu_hour:g}",
    )
    for item in bill.items:
        label = (
            item.name.capitalize() if item.name.islower() else item.name[0].upper() + item.name[1:]
        )
        yield from row(label, words.amount(item.cost), f"derived: {words.arithmetic(bill, item)}")
    yield ()
    yield from note(words.DERIVED)


def _doubtful(found: Fleet) -> Iterator[Line]:
    doubtful = [(one, said) for one in found.sessions if (said := words.state(one))]
    for one, said in doubtful[:SHOWN]:
        yield from wrapped("  - ", f"{one.origin.path}: {said}", "warning", "")
    yield from _others(len(doubtful))


def _failed(failed: tuple[Failed, ...]) -> Iterator[Line]:
    for one in failed[:SHOWN]:
        yield from wrapped("  - ", f"{one.path}: {one.reason}", "warning", "")
    yield from _others(len(failed))


def _doubles(doubles: tuple[Double, ...]) -> Iterator[Line]:
    for one in doubles[:SHOWN]:
        yield from wrapped("  - ", f"{one.path}: the same as {one.same_as}", "", "")
    yield from _others(len(doubles))


def _others(count: int) -> Iterator[Line]:
    if count > SHOWN:
        yield from note(f"and {count - SHOWN:,} more; --json has all")
