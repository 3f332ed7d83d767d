# SPDX-License-Identifier: Apache-2.0
"""How many tokens does an id of a trace stand for?

A prompt has an id for each full block, and one more or none for what is left. So each line bounds
the tokens of a block, from below and from above, and a few lines leave one size that is a power of
two. Where the lines have ``block_size``, that counts, and the same bounds check it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from analysis.errors import SessionError

USUAL = 512
"""Tokens of an id in the traces that were published with Mooncake."""

MOST = 1 << 20
"""No trace has larger blocks."""

_COUNT = pl.col("hash_ids").list.len().cast(pl.Int64)
_LEAST = pl.col("input_length") // (_COUNT + 1) + 1
_MOST = pl.when(_COUNT > 1).then((pl.col("input_length") - 1) // (_COUNT - 1)).otherwise(MOST)


@dataclass(frozen=True)
class _Bound:
    """A size that an id has at least or at most, and the row that says so."""

    size: int
    row: int
    ids: int
    tokens: int

    def said(self, content: bytes) -> str:
        ids = "1 id" if self.ids == 1 else f"{self.ids:,} ids"
        return f"line {line_number(content, self.row):,} has {ids} for {self.tokens:,} tokens"


def sizes(
    path: Path, content: bytes, rows: pl.DataFrame, given: int | None
) -> tuple[pl.Series, tuple[str, ...]]:
    """Of each row the tokens that an id stands for, and a note where that had to be deduced.

    Args:
        path: the trace, for messages.
        content: its text, for the numbers of lines.
        rows: its requests, with ``input_length``, ``hash_ids`` and ``block_size`` or null.
        given: what the user says that an id stands for.

    Raises:
        SessionError: the lines contradict each other or what is given, or leave several sizes.

    """
    said = rows["block_size"]
    if given is not None and bool((said.drop_nulls() != given).any()):
        row = int((said != given).fill_null(False).arg_max() or 0)
        raise SessionError(
            f"{path}, line {line_number(content, row):,}: block_size is {said[row]:,}, and "
            f"--tokens-per-id {given:,}; leave out one of them"
        )
    _check(path, content, rows)
    if not said.has_nulls():
        return said, ()
    size, notes = _deduced(path, content, rows.filter(pl.col("block_size").is_null()), given)
    return said.fill_null(size), notes


def line_number(content: bytes, row: int) -> int:
    """The line of the text, from 1 on, that has this row: blank lines have none."""
    full = (number for number, line in enumerate(content.splitlines(), 1) if line.strip())
    return next(number for at, number in enumerate(full) if at == row)


def _check(path: Path, content: bytes, rows: pl.DataFrame) -> None:
    """Raise a SessionError where a line has more or fewer ids than its own block_size makes."""
    size = pl.col("block_size")
    wrong = (size < _LEAST) | (size > _MOST)
    odd = rows.filter(wrong.fill_null(False)).head(1)
    for row, tokens, ids, block in odd.select("row", "input_length", _COUNT, size).iter_rows():
        raise SessionError(
            f"{path}, line {line_number(content, row):,}: hash_ids has {ids:,} ids where the "
            f"prompt of {tokens:,} tokens has {-(-tokens // block):,} blocks of {block:,}; repair "
            "or remove that line"
        )


def _deduced(
    path: Path, content: bytes, rows: pl.DataFrame, given: int | None
) -> tuple[int, tuple[str, ...]]:
    """The size of all ids whose lines do not have it."""
    least, most = _bounds(rows)
    if least.size > most.size:
        raise SessionError(
            f"{path} contradicts itself: {least.said(content)}, so that an id stands for at least "
            f"{least.size:,}, and {most.said(content)}, so that it stands for at most "
            f"{most.size:,}; repair or remove one of these lines"
        )
    if given is not None:
        if least.size <= given <= most.size:
            return given, ()
        bound, word = (least, "least") if given < least.size else (most, "most")
        raise SessionError(
            f"--tokens-per-id {given:,}: {bound.said(content)} in {path}, so that an id stands for "
            f"at {word} {bound.size:,}"
        )
    powers = [1 << shift for shift in range(21) if least.size <= 1 << shift <= most.size]
    proven = powers if len(powers) == 1 else [least.size] if least.size == most.size else []
    if proven == [USUAL] or (not proven and USUAL in powers):
        return USUAL, ()
    if proven:
        return proven[0], (f"an id stands for {proven[0]:,} tokens, as the lengths of lines prove",)
    if most.size == MOST:
        raise SessionError(
            f"{path}: {least.said(content)}, so that an id stands for {least.size:,} tokens or "
            "more; say for how many with --tokens-per-id, or repair that line"
        )
    raise SessionError(
        f"{path}: from its lengths, an id may stand for {least.size:,} to {most.size:,} tokens; "
        "say for how many with --tokens-per-id"
    )


def _bounds(rows: pl.DataFrame) -> tuple[_Bound, _Bound]:
    # The index of a row among all is that of its line.
    of = rows.select("row", _COUNT.alias("ids"), "input_length", least=_LEAST, most=_MOST)
    low, high = int(of["least"].arg_max() or 0), int(of["most"].arg_min() or 0)
    return (
        _Bound(of["least"][low], of["row"][low], of["ids"][low], of["input_length"][low]),
        _Bound(of["most"][high], of["row"][high], of["ids"][high], of["input_length"][high]),
    )
