# SPDX-License-Identifier: Apache-2.0
"""Why the prefix cache missed."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.prefix.miss_summary import Costly, MissReasons, Short
from analysis.renderers.text.layout import Line, note, row, table
from analysis.tables.facts import Facts
from analysis.wording.formats import byte_size, counted, seconds, share
from analysis.wording.misses import LOST, MEANINGS
from analysis.wording.printable import abridged


def lines(missed: MissReasons, facts: Facts) -> Iterator[Line]:
    """The section; empty where nothing was looked up."""
    if not missed.requests:
        return
    prompt = missed.query_tokens
    rows = [("Found", "", f"{missed.hit_tokens:,}", share(_part(missed.hit_tokens, prompt)), "")]
    rows += [
        (
            f"{reason.capitalize()}: {MEANINGS[reason]}",
            f"{part.blocks:,}" if part.blocks else "",
            f"{part.tokens:,}",
            share(_part(part.tokens, prompt)),
            f"{part.requests:,}",
        )
        for reason, part in missed.by_reason.items()
    ]
    partial = missed.partial_tokens
    rows.append(("Last block, not full", "", f"{partial:,}", share(_part(partial, prompt)), ""))
    yield from table(("", "blocks", "tokens", "of prompts", "requests"), rows)
    if missed.held_back_by:
        groups = ", ".join(
            f"group {group}: {blocks:,}" for group, blocks in missed.held_back_by.items()
        )
        yield from row("Held back by", groups)
    if missed.recomputed_tokens:
        yield from _evicted(missed, facts)
    kept = "new content"
    if any(reason in missed.by_reason for reason in LOST):
        kept += ", and what resets and evictions on request had lost"
    yield from row(
        "Ceiling", share(missed.ceiling), f"of tokens, if nothing had been missed but {kept}"
    )


def _evicted(missed: MissReasons, facts: Facts) -> Iterator[Line]:
    computed = f"{share(missed.recomputed_share)} of all prompt tokens computed"
    yield from row(
        "Recomputed", f"{missed.recomputed_tokens:,} tokens", f"that had been evicted, {computed}"
    )
    short = missed.short
    late = f"95 % by less than {seconds(short.late_p95_sec)}"
    yield from row("Evicted too early", f"by {seconds(short.late_p50_sec)} (median)", late)
    if short.more_blocks_max is not None:
        yield from row("Would have hit", _more(short, facts))
    if short.bounded:
        yield from note(
            f"For {counted(short.bounded, 'block')} that is the most that can be of use: a "
            "pool that holds every content of the session beside its largest load."
        )
    for costly in missed.costliest[:3]:
        yield from note(_costly(costly))


def _more(short: Short, facts: Facts) -> str:
    def blocks(count: int | None) -> str:
        return f"{count or 0:,}"

    largest = short.more_blocks_max or 0
    size = facts.bytes_per_block
    room = "" if size is None else f" ({byte_size(largest * size)} of KV cache)"
    return (
        f"half of them with {blocks(short.more_blocks_p50)} more blocks, nine in ten with "
        f"{blocks(short.more_blocks_p90)}, all with {blocks(largest)}{room}, at most"
    )


def _costly(costly: Costly) -> str:
    by = f" by {abridged(costly.evicted_by)}" if costly.evicted_by else ""
    more = "" if costly.more_blocks is None else f"; found with {costly.more_blocks:,} more blocks"
    return (
        f"{abridged(costly.request_id)} computed {costly.tokens:,} tokens again: evicted{by} "
        f"{seconds(costly.late_sec)} before{more}"
    )


def _part(tokens: int, whole: int) -> float | None:
    return tokens / whole if whole else None
