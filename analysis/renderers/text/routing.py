# SPDX-License-Identifier: Apache-2.0
"""What several replicas would have found under other routing, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from analysis.renderers.text.layout import Line, note, section, table
from analysis.renderers.text.painting import paint, plain
from analysis.whatif.routing.answer import Routed, Routing
from analysis.wording.formats import counted, number, seconds, share
from analysis.wording.printable import shortened

_MOST_REPLICAS = 7
"""The text lists no more of them."""


def write(found: Routing, out: TextIO) -> None:
    """Print what was found."""
    paint(lambda bar: _layout(found), out)


def render(found: Routing) -> str:
    """What was found as plain text."""
    return plain(lambda bar: _layout(found))


def _layout(found: Routing) -> Iterator[Line]:
    yield (("Routing  ", "label"), (shortened(found.name, 70), "title"))
    yield from note(_how(found))
    yield from section("Cache", _cache(found))
    yield from section("Load: the largest share of a replica, of the mean", _load(found))
    yield from section("Requests of each replica", _replicas(found))
    yield from section("How far to trust it", _truth(found))


def _how(found: Routing) -> str:
    sizes = sorted(set(found.num_blocks))
    each = number(sizes[0])
    if len(sizes) > 1:
        each = f"{each} to {number(sizes[-1])}"
    after = f" after {found.warm_up:,} of warm-up" if found.warm_up else ""
    return (
        f"{counted(found.one_cache.requests, 'request')}{after} on {len(found.num_blocks)} "
        f"replicas with {each} usable blocks of {found.block_size} tokens each."
    )


def _rows(found: Routing) -> list[Routed]:
    first = [one for one in (found.measured, found.as_recorded) if one is not None]
    return [*first, *found.policies]


def _cache(found: Routing) -> Iterator[Line]:
    heads = ("", "", "hit rate", "lost to others", "evictions")
    yield from table(
        heads,
        [
            (
                one.policy,
                one.says,
                share(one.hit_rate),
                share(one.elsewhere_rate),
                number(one.evictions),
            )
            for one in (*_rows(found), found.one_cache)
        ],
    )
    yield from note(
        "Lost to others: tokens that were computed although another replica had them. One cache: "
        f"a single one of {number(sum(found.num_blocks))} blocks for all requests."
    )


def _load(found: Routing) -> Iterator[Line]:
    heads = ("", "requests", "tokens", "running", "most at once")
    yield from table(
        heads,
        [
            (
                one.policy,
                _times(one.balance.requests),
                _times(one.balance.computed_tokens),
                _times(one.balance.running),
                number(max(replica.peak for replica in one.replicas)),
            )
            for one in _rows(found)
        ],
    )
    yield from note(
        "1.00x is even. Tokens: computed ones, of prompts and answers. Running: requests sent and "
        "not ended, on average over time."
    )


def _times(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}x"


def _replicas(found: Routing) -> Iterator[Line]:
    count = len(found.replicas)
    if count > _MOST_REPLICAS:
        return
    yield from table(
        ("", *map(str, range(count))),
        [(one.policy, *(number(each.requests) for each in one.replicas)) for one in _rows(found)],
    )
    if found.measured is not None:
        for at, name in enumerate(found.replicas):
            yield from note(f"{at}: {shortened(name, 70)}")


def _truth(found: Routing) -> Iterator[Line]:
    was, model = found.measured, found.as_recorded
    if was is not None and model is not None and was.hit_rate is not None:
        yield from note(f"The model of the recorded routing has {_beside(was, model)}.")
    times = (
        "as long as was recorded"
        if found.step_sec is None
        else f"{seconds(found.step_sec)} for each token of its answer"
    )
    yield from note(
        f"A request takes {times}, whichever replica it is sent to and whatever it finds there."
    )
    bounds = found.bounds
    yield from note(
        f"sticky goes by {found.sticky_by}: {counted(found.keys, 'key')}. prefix-aware and "
        f"cache-aware want a match of more than {100 * bounds.cache_threshold:g} % of the prompt, "
        f"and go by load alone while loads are more than {bounds.balance_abs_threshold} requests "
        f"and more than {bounds.balance_rel_threshold:g} times apart."
    )
    if found.never_admitted:
        yield from note(f"{counted(found.never_admitted, 'request')} never admitted: left out.")
    for line in found.notes:
        yield from note(line)


def _beside(was: Routed, model: Routed) -> str:
    points = 100 * ((model.hit_rate or 0) - (was.hit_rate or 0))
    if abs(points) < 0.005:
        return "the measured hit rate"
    return (
        f"a hit rate {abs(points):.2f} points {'above' if points > 0 else 'below'} the measured one"
    )
