# SPDX-License-Identifier: Apache-2.0
"""What could this workload find at all, in a pool that never evicts, and where does it come from?

Of the prompt tokens, a pool without an end finds those in full blocks that an earlier request of
the same engine had computed, but for the block with a prompt's last token, which is always
computed. They are *within* a conversation where the request that first computed the block belongs
to the same conversation, and *across* conversations otherwise.

A request continues the conversation of an earlier one if its prompt is the longer one and begins
with all full blocks of the earlier prompt, and if the last block that it shares with anything
before was first computed by the earlier one. The latter keeps requests apart that only begin
alike, with a system prompt: whoever computed the last shared block had more in its prompt. (A
request whose whole prompt is what others begin with does become the first turn of them all, if it
was the first to compute it.) A prompt that is sent again as it was begins a conversation of its
own.
"""

from __future__ import annotations

import numpy as np

from analysis.whatif.curve import Ceiling
from analysis.whatif.ids import Ints
from analysis.whatif.references import References, first_user
from analysis.whatif.workload import Bools


def measure(engines: list[References]) -> Ceiling:
    """The ceiling of these engines' workloads, each with a pool of its own."""
    requests = query = within = across = conversations = distinct = 0
    for references in engines:
        first = first_user(references)
        belongs = _conversations(references, first)
        rows = references.chains.rows
        found = _seen(references, first) & references.can_be_found & references.counts[rows]
        own = belongs[first] == belongs[rows]
        requests += int(references.counts.sum())
        query += int(references.input_tokens[references.counts].sum())
        within += int((found & own).sum()) * references.block_size
        across += int((found & ~own).sum()) * references.block_size
        conversations += len(np.unique(belongs[references.counts]))
        distinct += references.blocks
    hits = within + across
    return Ceiling(
        requests=requests,
        query_tokens=query,
        within_tokens=within,
        across_tokens=across,
        new_tokens=query - hits,
        hit_rate=hits / query if query else None,
        conversations=conversations,
        distinct_blocks=distinct,
    )


def _seen(references: References, first: Ints) -> Bools:
    """Of each reference, whether an earlier request had the block. As a block stands for all that
    comes before it, too, none is seen after one that is not."""
    return first < references.chains.rows


def _conversations(references: References, first: Ints) -> Ints:
    """Of each request, the first one of its conversation."""
    chains = references.chains
    prompt_blocks = references.input_tokens // references.block_size
    in_prompt = chains.positions < np.repeat(prompt_blocks, chains.lengths)
    shared = np.bincount(
        chains.rows[_seen(references, first) & in_prompt], minlength=len(references)
    )
    last = np.where(shared > 0, chains.offsets[:-1] + shared - 1, 0)
    before = first[last] if len(first) else np.zeros(len(references), np.int64)
    longer = references.input_tokens > references.input_tokens[before]
    continues = (shared > 0) & (shared >= prompt_blocks[before]) & longer
    belongs: list[int] = []
    for request, (earlier, goes_on) in enumerate(
        zip(before.tolist(), continues.tolist(), strict=True)
    ):
        belongs.append(belongs[earlier] if goes_on else request)
    return np.array(belongs, np.int64)
