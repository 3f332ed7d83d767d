# SPDX-License-Identifier: Apache-2.0
"""How many bytes has a block, when vLLM says only how many blocks fit into the memory?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MEMORY = 2**60
_PLENTY = 2**66
"""Bytes for the stage in question, and for the others, so that these never decide."""


class SeveralSizesError(Exception):
    """The number of blocks does not tell their size; the text says so, in one line."""


def deciding(stage: int, stages: int) -> list[int]:
    """Bytes of each of so many stages, of which this one decides how many blocks there are."""
    return [_MEMORY if each == stage else _PLENTY for each in range(stages)]


def bytes_per_block(found: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    """Bytes of a block in each stage, from what vLLM made with that stage deciding.

    Raises:
        SeveralSizesError: several sizes give this number of blocks.

    """
    return tuple(_size(configs[stage].num_blocks) for stage, configs in enumerate(found))


def _size(blocks: int) -> int:
    """The only size of which exactly so many fit into the memory."""
    size = round(_MEMORY / blocks)
    if [each for each in (size - 1, size, size + 1) if each and _MEMORY // each == blocks] != [
        size
    ]:
        raise SeveralSizesError(f"{blocks:,} blocks in {_MEMORY:,} bytes fit several sizes")
    return size
