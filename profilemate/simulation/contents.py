# SPDX-License-Identifier: Apache-2.0
"""Which tokens stand for what a request consists of?

No text was recorded, and none is needed: vLLM asks of tokens only whether they are the same. Every
content id stands for as many tokens as a recorded block held, each of them a number that occurs
nowhere else, so tokens are the same where contents are, whatever the block size is now. An id
stands for all that comes before it, too, and for adapter and cache salt, so these need no tokens.
"""

from __future__ import annotations

import numpy as np

from analysis.whatif.ids import Ids, Ints, offsets
from analysis.whatif.prefixes import UNIT, UNKNOWN
from analysis.whatif.workload import Workload


class Contents:
    """The tokens of an engine's requests.

    What ids do not tell, such as the end of an answer that fills no block, is like nothing else.

    Args:
        workload: the requests.
        prefixes: of each of them what stands for its prompt's first ``UNIT`` tokens, for twice as
            many, and so on: tells contents by less than a block.

    """

    def __init__(self, workload: Workload, prefixes: Ids | None = None) -> None:
        size = workload.block_size
        self._input = workload.input_tokens
        total = workload.input_tokens + workload.output_tokens
        goes_on = workload.output_ids.lengths > 0
        # A last partial block of the prompt is part of what the prompt and the output share,
        # where that is known.
        full = np.where(goes_on, workload.input_tokens // size, workload.prompt_ids.lengths)
        ids = workload.prompt_ids.head(full) + workload.output_ids
        distinct, numbers = np.unique(ids.values, return_inverse=True)
        self._blocks = Ids(numbers.ravel(), ids.offsets)
        by_parts = prefixes is not None and size > UNIT and size % UNIT == 0
        self._unit = UNIT if by_parts else size
        self._parts = np.arange(len(distinct) * size // self._unit).reshape(len(distinct), -1)
        if prefixes is not None and by_parts:
            self._tell_parts(prefixes)
        told = np.minimum(ids.lengths * size, total)
        self._told = np.where(goes_on, told, np.minimum(told, self._input))
        begin = int(self._parts.max(initial=-1) + 1) * self._unit
        self._own = begin + offsets(np.maximum(total - self._told, 0))

    def _tell_parts(self, prefixes: Ids) -> None:
        """Have blocks that begin alike have the same first parts.

        A part that ends with its block is told by the block's own id.
        """
        row, position = self._blocks.rows, self._blocks.positions
        known, count = prefixes.lengths, self._parts.shape[1]
        _, codes = np.unique(prefixes.values, return_inverse=True)
        codes = codes.ravel() + self._parts.size
        for part in range(count - 1):
            prefix = position * count + part
            at = np.flatnonzero(prefix < known[row])
            where = prefixes.offsets[:-1][row[at]] + prefix[at]
            is_told = prefixes.values[where] != UNKNOWN
            self._parts[self._blocks.values[at[is_told]], part] = codes[where[is_told]]

    def __call__(self, request: int) -> tuple[list[int], list[int]]:
        """The tokens of a request's prompt and of its answer."""
        starts = self._parts[self._blocks[request]].ravel() * self._unit
        told = (starts[:, None] + np.arange(self._unit)).ravel()[: self._told[request]]
        own: Ints = np.arange(self._own[request], self._own[request + 1])
        tokens = np.concatenate([told, own]).tolist()
        prompt = int(self._input[request])
        return tokens[:prompt], tokens[prompt:]
