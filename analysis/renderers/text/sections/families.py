# SPDX-License-Identifier: Apache-2.0
"""What prompts that begin alike share, and where they part."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.prefix.families import Families, Family, TooShort
from analysis.renderers.text.layout import Line, note, row
from analysis.wording.formats import share


def lines(found: Families) -> Iterator[Line]:
    """The section; empty where no request was admitted."""
    if not found.requests:
        return
    if not found.sharing:
        yield from note("No prompt begins with 16 or more tokens of an earlier one.")
        return
    shared = found.shared_tokens / found.prompt_tokens if found.prompt_tokens else None
    yield from row(
        "Shared beginnings",
        f"{share(shared)} of tokens",
        f"in {found.sharing:,} of {found.requests:,} prompts that begin as an earlier one",
    )
    if found.unit_never_fills:
        yield from note(
            f"A hit is a multiple of {found.unit:,} tokens, more than any request can have: "
            "no block can ever be found."
        )
    if found.too_short:
        yield from _too_short(found.too_short)
    for family in found.largest[:3]:
        yield from note(_family(family))


def _too_short(short: TooShort) -> Iterator[Line]:
    yield from row(
        "Shared, too short",
        f"{short.requests:,} prompts",
        f"share up to {short.longest_tokens:,} tokens, and a block has {short.unit:,}",
    )
    if short.finding_unit is not None:
        yield from note(
            f"Blocks of {short.finding_unit:,} tokens would have found {short.found_tokens:,} "
            "tokens of these."
        )


def _family(family: Family) -> str:
    return (
        f"{family.requests:,} prompts share their first {family.shared_tokens:,} tokens and part "
        f"in {family.continuations:,} ways before token {family.part_before:,} "
        f"({family.tokens_after:,} tokens come after it)"
    )
