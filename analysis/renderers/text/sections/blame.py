# SPDX-License-Identifier: Apache-2.0
"""Who evicted what others needed."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.pool.evictions import Evictions
from analysis.prefix.blame import Blame, Content, Evictor, Sweepers
from analysis.renderers.text.layout import Line, note, row, table
from analysis.wording.formats import counted, seconds, share
from analysis.wording.misses import LOST
from analysis.wording.printable import shortened

SHOWN = 5


def lines(blame: Blame, evictions: Evictions) -> Iterator[Line]:
    """The section; empty where nothing was computed again because of an eviction."""
    if blame.recomputed_tokens:
        yield from _evictors(blame)
    for reason, lost in evictions.on_purpose.items():
        tokens = f"{lost.recomputed_tokens:,} tokens"
        yield from row(LOST[reason], tokens, "computed again; no request needed their room")


def _evictors(blame: Blame) -> Iterator[Line]:
    tokens = f"{blame.recomputed_tokens:,} tokens"
    yield from row("Recomputed", tokens, f"evicted for {counted(blame.evictors, 'request')}")
    heads = ("", "evicted", "asked again", "tokens", "requests", "after")
    yield from table(heads, [_evictor(evictor) for evictor in blame.worst[:SHOWN]])
    yield from note(
        "Evicted: blocks that gave way to the request. Asked again: how many of these others "
        "missed later. Tokens: what those requests computed again. After: how long after the "
        "eviction (median)."
    )
    if blame.sweepers.requests:
        yield from _sweepers(blame.sweepers)
    for content in blame.contents[:3]:
        yield from note(_content(content))


def _evictor(evictor: Evictor) -> tuple[str, ...]:
    return (
        shortened(evictor.request_id or "not known", 22),
        f"{evictor.evicted_blocks:,}",
        f"{evictor.regretted_blocks:,}",
        f"{evictor.recomputed_tokens:,}",
        f"{evictor.requests:,}",
        seconds(evictor.after_p50_sec),
    )


def _sweepers(swept: Sweepers) -> Iterator[Line]:
    evicted = counted(swept.evicted_blocks, "block")
    yield from row(
        "One-off prompts",
        f"{swept.requests:,}",
        f"evicted {evicted} ({swept.evicted_tokens:,} tokens), and nobody asked for their own "
        f"blocks again. {swept.regretted_blocks:,} of the evicted ones were asked for again: "
        f"{share(swept.share)} of the recomputed tokens",
    )
    if swept.proven_blocks:
        yield from note(
            f"{swept.proven_blocks:,} of these had been used by two requests or more before: a "
            "policy that counts uses would have had a reason to keep them."
        )


def _content(content: Content) -> str:
    prompts = counted(content.misses, "prompt")
    where = f"Tokens {content.begin_token:,} to {content.end_token:,} of {prompts}"
    return (
        f"{where} (content {content.content_id}) were evicted and computed again: "
        f"{content.recomputed_tokens:,} tokens"
    )
