# SPDX-License-Identifier: Apache-2.0
"""The bytes of a block, out of how many blocks fit into the memory that vLLM was told of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profilemate.simulation.memory import SeveralSizesError, bytes_per_block, deciding


def sized(*sizes: int) -> tuple[int, ...]:
    """What is found of blocks of these sizes, one for each stage."""
    given = [deciding(stage, len(sizes)) for stage in range(len(sizes))]
    return bytes_per_block(
        [
            [SimpleNamespace(num_blocks=min(map(int.__floordiv__, memory, sizes)))] * len(sizes)
            for memory in given
        ]
    )


@given(st.lists(st.integers(2**10, 2**15), min_size=1, max_size=4))
def test_the_stage_in_question_decides(sizes: list[int]) -> None:
    assert sized(*sizes) == tuple(sizes)


@given(st.integers(2, 2**29))
def test_a_size_is_exact(size: int) -> None:
    assert sized(size) == (size,)


@pytest.mark.parametrize("size", [2**31 + 1, 2**35 - 3])
def test_a_size_that_is_not_the_only_one(size: int) -> None:
    with pytest.raises(SeveralSizesError, match="fit several sizes"):
        sized(size)
