# SPDX-License-Identifier: Apache-2.0
"""What could this workload find in a pool that never evicts, and where does it come from?

Such a pool finds all tokens in full blocks that an earlier request of the same engine computed,
except the block with a prompt's last token, which vLLM always computes. A token is found *within* a
conversation if the request that first computed its block belongs to the same conversation, and
*across* conversations otherwise.

A request continues the conversation of an earlier one under three conditions: its prompt is
longer, it begins with all full blocks of the earlier prompt, and the earlier request was the first
to compute the last block that it shares with any request before. The last condition keeps requests
apart that only share a system prompt: the request that computed the last shared block had more in
its prompt. (If the whole prompt of a request is what others begin with, and it computed that first,
it becomes the first turn of them all.) A prompt that is sent again unchanged begins a conversation
of its own.
"""

from __future__ import annotations

from dataclasses import replace

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
        distinct += references.contents
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


def with_dropped(most: Ceiling, kept: list[References]) -> Ceiling:
    """The ceiling, with what is lost on purpose. ``kept``: the same workloads if nothing was."""
    free = measure(kept)
    return replace(most, dropped_tokens=most.new_tokens - free.new_tokens)


def _seen(references: References, first: Ints) -> Bools:
    """For each reference, whether an earlier request had the block.

    A block stands for all before it, too. So no block has been seen that follows an unseen one.
    """
    return first < references.chains.rows


def _conversations(references: References, first: Ints) -> Ints:
    """For each request, the first one of its conversation."""
    belongs: list[int] = []
    for request, earlier in enumerate(turns_before(references, first).tolist()):
        belongs.append(request if earlier < 0 else belongs[earlier])
    return np.array(belongs, np.int64)


def turns_before(references: References, first: Ints) -> Ints:
    """For each request, the one whose conversation it continues; -1 where it begins one.

    ``first``: for each reference, the first request that had the block.
    """
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
    return np.where(continues, before, -1)
