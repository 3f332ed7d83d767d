# SPDX-License-Identifier: Apache-2.0
"""Hit rates by pool size and eviction rule, as the fast engine models them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from analysis.renderers.text.layout import Line, note, row, section, table
from analysis.renderers.text.painting import paint, plain
from analysis.whatif.curve import LRU, Curve, Point
from analysis.whatif.outcome import Outcome
from analysis.wording.formats import counted, number, share
from analysis.wording.miss_ratio_curve import sentences
from analysis.wording.printable import shortened

_BAR = 50


def write(found: Curve, out: TextIO) -> None:
    """Print what was found."""
    paint(lambda bar: _layout(found, bar), out)


def render(found: Curve) -> str:
    """What was found as plain text."""
    return plain(lambda bar: _layout(found, bar))


def _layout(found: Curve, bar: str) -> Iterator[Line]:
    yield (("What if  ", "label"), (shortened(found.name, 70), "title"))
    yield from note(_how(found))
    yield from section("What holds the hit rate back", _verdict(found))
    yield from section("Ceiling (modelled): a pool that never evicts", _ceiling(found))
    yield from section("Pools under LRU, vLLM's rule (modelled)", _pools(found))
    yield from section("Miss-ratio curve (modelled)", _curve(found, bar))
    yield from section("Hit rate by eviction rule (modelled)", _rules(found))


def _how(found: Curve) -> str:
    each = "" if found.engines == 1 else f" on each of {found.engines} engines"
    after = f" after {found.warm_up:,} of warm-up" if found.warm_up else ""
    return (
        f"{counted(found.ceiling.requests, 'request')}{after} with {found.references:,} blocks of "
        f"{found.block_size} tokens; pools{each} modelled from the content ids, without vLLM."
    )


def _verdict(found: Curve) -> Iterator[Line]:
    for sentence in (*sentences(found), *found.notes):
        yield from note(sentence)


def _ceiling(found: Curve) -> Iterator[Line]:
    most = found.ceiling
    if not most.query_tokens:
        return
    for label, tokens, more in (
        ("within conversation", most.within_tokens, f"of {most.conversations:,} conversations"),
        ("across", most.across_tokens, "computed first in another conversation"),
        ("dropped", most.dropped_tokens, "lost to resets and evictions on request"),
        ("new", most.new_tokens - most.dropped_tokens, "never there before in a full block"),
    ):
        if label == "dropped" and not tokens:
            continue
        yield from row(label, share(tokens / most.query_tokens), f"{tokens:,} tokens, {more}")


def _pools(found: Curve) -> Iterator[Line]:
    heads = ("blocks", "of now", "GiB a GPU", "utilization", "GPUs", "hit rate", "evictions")
    rows: list[tuple[str, ...]] = []
    if found.measured is not None:
        was = found.measured
        rows.append(("measured", "", "", "", "", share(was.hit_rate), number(was.evictions)))
    rows += [_pool(point, outcome) for point, outcome in _under_lru(found)]
    yield from table(heads, rows)
    yield from note(
        "Blocks that can hold content. vLLM keeps one of a pool for itself, so --blocks and "
        "--num-gpu-blocks-override name one more."
    )
    for point, outcome in _under_lru(found):
        if outcome.failed_requests:
            yield from note(
                f"With {point.pool.num_blocks:,} blocks "
                f"{counted(outcome.failed_requests, 'request')} can never fit."
            )


def _under_lru(found: Curve) -> list[tuple[Point, Outcome]]:
    pairs = [(point, point.outcome(LRU)) for point in found.points]
    return [(point, outcome) for point, outcome in pairs if outcome is not None]


def _pool(point: Point, outcome: Outcome) -> tuple[str, ...]:
    pool = point.pool
    return (
        f"{pool.num_blocks:,}",
        "" if pool.factor is None else f"{pool.factor:.2f}x",
        "n/a" if pool.gib is None else f"{pool.gib:.2f}",
        "n/a" if pool.gpu_memory_utilization is None else f"{pool.gpu_memory_utilization:.3f}",
        "n/a" if pool.gpus is None else f"{pool.gpus}",
        share(outcome.hit_rate),
        number(outcome.evictions),
    )


def _curve(found: Curve, bar: str) -> Iterator[Line]:
    for point, outcome in _under_lru(found):
        if outcome.hit_rate is not None:
            missed = 1 - outcome.hit_rate
            yield (
                (f"  {point.pool.num_blocks:>12,}  ", "label"),
                (f"{share(missed):>9}  ", "figure"),
                (bar * round(_BAR * missed), ""),
            )


def _rules(found: Curve) -> Iterator[Line]:
    policies = [outcome.policy for outcome in found.points[0].outcomes] if found.points else []
    if len(policies) < 2:
        return
    rows = [
        (f"{point.pool.num_blocks:,}", *(share(outcome.hit_rate) for outcome in point.outcomes))
        for point in found.points
    ]
    yield from table(("blocks", *policies), [[cell.removesuffix(" %") for cell in r] for r in rows])
    yield from note("In % of the prompt tokens. belady knows the future: no rule can find more.")
