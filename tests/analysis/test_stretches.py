# SPDX-License-Identifier: Apache-2.0
"""Stretches of blocks that requests share, against a look at each block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import polars as pl
from hypothesis import example, given
from hypothesis import strategies as st

from analysis.prefix import stretches
from analysis.prefix.prompts import ENGINES, Prompts

Request = tuple[list[int], int, int, int, int]
"""Contents of its blocks; how many of them it has computed, has in its prompt, and found; its
engine."""

BLOCK = 16

requests = st.tuples(
    st.lists(st.integers(1, 6), min_size=0, max_size=6, unique=True),
    st.integers(0, 6),
    st.integers(0, 6),
    st.integers(0, 6),
    st.integers(0, 1),
)


def prompts(asking: Sequence[Request]) -> Prompts:
    """What ``analysis.prefix.prompts`` makes of such requests, as far as stretches need it."""
    rows = [
        (content * ENGINES + engine, number, index, index < made, index < prompt)
        for number, (contents, made, prompt, _, engine) in enumerate(asking)
        for index, content in enumerate(contents)
    ]
    schema = {
        "key": pl.Int64,
        "request": pl.UInt32,
        "index": pl.UInt32,
        "made": pl.Boolean,
        "in_prompt": pl.Boolean,
    }
    asked = pl.DataFrame(
        {
            "request": range(len(asking)),
            "block_size": [BLOCK] * len(asking),
            "in_window": [number % 3 > 0 for number in range(len(asking))],
            # A last token beyond the prompt's full blocks.
            "query_tokens": [BLOCK * prompt + 1 for _, _, prompt, _, _ in asking],
            "hit_tokens": [BLOCK * found for _, _, _, found, _ in asking],
        },
        schema={
            "request": pl.UInt32,
            "block_size": pl.Int64,
            "in_window": pl.Boolean,
            "query_tokens": pl.Int64,
            "hit_tokens": pl.Int64,
        },
    )
    contents = pl.DataFrame(rows, schema=schema, orient="row")
    return Prompts(asked, pl.DataFrame(), contents, pl.DataFrame())


@given(st.lists(requests, max_size=6))
@example([([1, 2, 3], 3, 3, 0, 0), ([1, 2, 4], 3, 3, 2, 0)])
# Contents that follow others than elsewhere, as no prompt of vLLM's has them.
@example([([1, 2], 2, 2, 0, 0), ([2, 1], 2, 2, 0, 0)])
@example([([1, 2, 3], 3, 3, 0, 0), ([1, 3, 2], 3, 3, 0, 0)])
def test_what_holds_for_one_block_of_a_stretch_holds_for_all(asking: list[Request]) -> None:
    known = prompts(asking)
    found = stretches.in_common(known)
    keys = known.contents["key"].to_list()
    blocks = [
        (row["request"], row["index"] + offset, keys[row["at"] + offset], row["key"], offset, row)
        for row in found.iter_rows(named=True)
        for offset in range(row["blocks"])
    ]
    users: defaultdict[int, set[int]] = defaultdict(set)
    for number, (contents, *_) in enumerate(asking):
        for content in contents:
            users[content].add(number)
    # Each block that several requests have is in one stretch, with what its request did with it.
    expected = {
        (number, index): (
            content * ENGINES + engine,
            index < made,
            index < prompt,
            number % 3 > 0 and index < prompt,
            index < hit,
        )
        for number, (contents, made, prompt, hit, engine) in enumerate(asking)
        for index, content in enumerate(contents)
        if len(users[content]) > 1
    }
    flags = ("made", "in_prompt", "asked", "found")
    seen = {
        (request, index): (key, *(row[flag] for flag in flags))
        for request, index, key, _, _, row in blocks
    }
    assert len(blocks) == len(seen)
    assert seen == expected
    # On an engine a content has the same place in the same stretch, whoever has it.
    places = {(key, stretch, offset) for _, _, key, stretch, offset, _ in blocks}
    assert len(places) == len({key for key, _, _ in places})
    assert all(
        row["last_key"] == key for *_, key, _, offset, row in blocks if offset + 1 == row["blocks"]
    )
