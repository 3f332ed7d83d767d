# SPDX-License-Identifier: Apache-2.0
"""Whose requests found what, and what they took from others."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.text.layout import LABEL, WIDTH, Line, note, row, table
from analysis.requests.by_whom import ByWhom, Share, Split
from analysis.wording.by_whom import NAMES, named, rows
from analysis.wording.formats import number, seconds, share
from analysis.wording.printable import shortened

SHOWN = 5
"""How many keys of each kind the section names."""

_WIDEST = 22


def lines(found: ByWhom) -> Iterator[Line]:
    """The section; empty where all requests have the same keys."""
    several = [split for split in found.splits if split.keys > 1]
    if not several:
        return
    if found.known_elsewhere_tokens:
        yield from new_to_their_own(found.known_elsewhere_tokens)
    for split in several:
        heads = ("requests", "prompt tokens", "hit rate", "again", "1st tok. 95th")
        yield from table(
            (_head(split), *heads),
            [
                (
                    shortened(name, _WIDEST),
                    f"{part.requests:,}",
                    f"{part.query_tokens:,}",
                    share(part.hit_rate),
                    f"{part.missed_by_reason.get('capacity', 0):,}",
                    seconds(part.first_token_p95_sec),
                )
                for name, part in rows(split, SHOWN)
            ],
        )
        if split.by == "priority":
            yield from _waits(split, SHOWN)
    yield from note(
        "Again: prompt tokens computed again after an eviction. 'profilemate summary --by "
        f"{several[0].by}' has more."
    )


_KINDS_IN_SHORT = 3
_ROOM = WIDTH - LABEL - 2
_NAME_IN_SHORT = 16


def in_short(found: ByWhom) -> Iterator[Line]:
    """A line for each kind of key of which there are several, with the hit rates of the largest."""
    several = [split for split in found.splits if split.keys > 1]
    for split in several[:_KINDS_IN_SHORT]:
        words, left = "hit rate", split.keys
        for share_of in split.shares:
            name = shortened(named(share_of, split.by), _NAME_IN_SHORT)
            longer = f"{words}{'' if left == split.keys else ','} {name} {share(share_of.hit_rate)}"
            if len(longer + _more(left - 1)) > _ROOM:
                break
            words, left = longer, left - 1
        yield from row(_head(split), words + _more(left))


def _more(keys: int) -> str:
    return f", {keys:,} more" if keys else ""


def new_to_their_own(tokens: int) -> Iterator[Line]:
    yield from row(
        "New to their own",
        f"{tokens:,} prompt tokens",
        "had come before under another salt or adapter, with which they share nothing",
    )


def whole(split: Split, shown: int) -> Iterator[Line]:
    """All tables of one split."""
    parts = rows(split, shown)
    yield from table(
        (_head(split), "requests", "prompt tokens", "found", "hit rate"),
        [
            (
                shortened(name, _WIDEST),
                f"{part.requests:,}",
                f"{part.query_tokens:,}",
                f"{part.hit_tokens:,}",
                share(part.hit_rate),
            )
            for name, part in parts
        ],
    )
    yield from table(
        ("Prompt tokens missed", "new", "to it alone", "again", "others"),
        [(shortened(name, _WIDEST), *_missed(part)) for name, part in parts],
    )
    yield from note(
        "To it alone: the part of the new ones that had come before under another salt or adapter. "
        "Again: they had been evicted for room. Others: all other reasons."
    )
    yield from table(
        ("Blocks", "evicted", "lost", "cost, tokens", "of others", "held, s", "kept, s"),
        [
            (
                shortened(name, _WIDEST),
                f"{part.evicted_blocks:,}",
                f"{part.lost_blocks:,}",
                f"{part.recomputed_for_it_tokens:,}",
                f"{part.of_others_tokens:,}",
                f"{part.held:,.1f}",
                f"{part.kept:,.1f}",
            )
            for name, part in parts
        ],
    )
    yield from note(
        "Evicted: by its requests. Lost: they were the last to hold them. Cost: tokens that were "
        "computed again because its requests had evicted them; of others: by requests of other "
        "keys. Held and kept: block-seconds, of a block that several hold once for each of them; "
        "kept until it was evicted."
    )
    yield from _waits(split, shown)


def _missed(part: Share) -> tuple[str, ...]:
    new, again = (part.missed_by_reason.get(reason, 0) for reason in ("compulsory", "capacity"))
    others = sum(part.missed_by_reason.values()) - new - again
    return f"{new:,}", number(part.known_elsewhere_tokens), f"{again:,}", f"{others:,}"


def _waits(split: Split, shown: int) -> Iterator[Line]:
    yield from table(
        ("From arrival", "queued", "95th", "1st token", "95th", "preempted", "others"),
        [
            (
                shortened(name, _WIDEST),
                seconds(part.queued_p50_sec),
                seconds(part.queued_p95_sec),
                seconds(part.first_token_p50_sec),
                seconds(part.first_token_p95_sec),
                f"{part.preempted:,}",
                f"{part.preempted_others:,}",
            )
            for name, part in rows(split, shown)
        ],
    )
    yield from note(
        "Medians and 95th percentiles. Preempted: its requests. Others: requests that were "
        "preempted to make room for its."
    )


def _head(split: Split) -> str:
    return f"By {NAMES[split.by]}"
