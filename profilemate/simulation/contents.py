# SPDX-License-Identifier: Apache-2.0
"""Which tokens does a request consist of?

No text was recorded, and none is needed: vLLM only compares tokens. Each content id becomes as many
tokens as a recorded block held, all of them numbers that occur nowhere else. So tokens are equal
where contents are, whatever the block size is now. An id also covers all that comes before it, the
adapter and the cache salt, so these need no tokens of their own.
"""

from __future__ import annotations

import numpy as np

from analysis.whatif.ids import Ids, Ints, offsets
from analysis.whatif.prefixes import UNIT, UNKNOWN
from analysis.whatif.workload import Workload


class Contents:
    """The tokens of an engine's requests.

    Tokens without a content id, such as the end of an answer that fills no block, equal no others.

    Args:
        workload: the requests.
        prefixes: for each request an id of its prompt's first ``UNIT`` tokens, of the first two
            units, and so on. They distinguish contents that differ within a block.

    """

    def __init__(self, workload: Workload, prefixes: Ids | None = None) -> None:
        size = workload.block_size
        self._input = workload.input_tokens
        total = workload.input_tokens + workload.output_tokens
        goes_on = workload.output_ids.lengths > 0
        # The prompt's last partial block is part of a block that prompt and answer share, where the
        # id of that is known.
        full = np.where(goes_on, workload.input_tokens // size, workload.prompt_ids.lengths)
        ids = workload.prompt_ids.head(full) + workload.output_ids
        distinct, numbers = np.unique(ids.values, return_inverse=True)
        self._blocks = Ids(numbers.ravel(), ids.offsets)
        by_parts = prefixes is not None and size > UNIT and size % UNIT == 0
        self._unit = UNIT if by_parts else size
        self._parts = np.arange(len(distinct) * size // self._unit).reshape(len(distinct), -1)
        if prefixes is not None and by_parts:
            self._share_parts(prefixes)
        with_id = np.minimum(ids.lengths * size, total)
        self._with_id = np.where(goes_on, with_id, np.minimum(with_id, self._input))
        begin = int(self._parts.max(initial=-1) + 1) * self._unit
        self._own = begin + offsets(np.maximum(total - self._with_id, 0))

    def _share_parts(self, prefixes: Ids) -> None:
        """Give the same first parts to blocks that begin with the same tokens.

        A block's last part is its own: the block's id says which others share it.
        """
        row, position = self._blocks.rows, self._blocks.positions
        known, count = prefixes.lengths, self._parts.shape[1]
        _, codes = np.unique(prefixes.values, return_inverse=True)
        codes = codes.ravel() + self._parts.size
        for part in range(count - 1):
            prefix = position * count + part
            at = np.flatnonzero(prefix < known[row])
            where = prefixes.offsets[:-1][row[at]] + prefix[at]
            is_known = prefixes.values[where] != UNKNOWN
            self._parts[self._blocks.values[at[is_known]], part] = codes[where[is_known]]

    def __call__(self, request: int) -> tuple[list[int], list[int]]:
        """The tokens of a request's prompt and of its answer."""
        starts = self._parts[self._blocks[request]].ravel() * self._unit
        with_id = (starts[:, None] + np.arange(self._unit)).ravel()[: self._with_id[request]]
        own: Ints = np.arange(self._own[request], self._own[request + 1])
        tokens = np.concatenate([with_id, own]).tolist()
        prompt = int(self._input[request])
        return tokens[:prompt], tokens[prompt:]
