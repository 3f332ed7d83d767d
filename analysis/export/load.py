# SPDX-License-Identifier: Apache-2.0
"""What was asked of the engines, so that it can be asked again: when, how long, and what is shared?

Prompts are not recorded. What is known is which of their blocks are equal, and that is all that the
prefix cache goes by: any tokens do that are equal where the recorded ones were.

Answers cannot be asked for. Where a prompt repeats the answer of an earlier request, the new engine
gave another one, so these blocks are computed once more than they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from analysis.tables.metadata import flag
from analysis.tables.session import Session
from analysis.whatif.ids import Ids, Ints, offsets
from analysis.whatif.users import turns
from analysis.whatif.workload import Floats, NothingToTry, Workload, of_session

_ENGINES = 1024
"""Room for so many data-parallel ranks beside an id."""


@dataclass(frozen=True)
class Load:
    """Requests in order of arrival. Every array and list has one entry for each.

    ``block_size``: tokens that an id stands for. ``at_sec``: since the first request.
    ``input_tokens`` and ``output_tokens``: lengths of prompt and answer. ``ids``: one for each
    block of the prompt, a last partial one included, numbered by first appearance. An id stands for
    all of the prompt up to the end of its block. ``notes``: what the load lacks, a sentence each.
    """

    block_size: int
    at_sec: Floats
    input_tokens: Ints
    output_tokens: Ints
    ids: Ids
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.at_sec)

    @property
    def shared_tokens(self) -> int:
        """Tokens in full blocks of prompts that an earlier request asked for, too."""
        full = self.ids.head(self.input_tokens // self.block_size)
        return int((_first_rows(full) < full.rows).sum()) * self.block_size

    def faster(self, factor: float) -> Load:
        """The same requests, so many times as many a second."""
        return replace(self, at_sec=self.at_sec / factor)

    def with_users(self, factor: int, conversation: Ints) -> Load:
        """So many times as many conversations at once.

        Each copy of a request comes a little after it, and has contents of its own, but for the
        blocks that several conversations share, such as a system prompt.

        Args:
            factor: how many times.
            conversation: for each request, the first one of its conversation.

        """
        blocks = int(self.ids.values.max(initial=-1)) + 1
        pairs = np.unique(np.stack([self.ids.values, conversation[self.ids.rows]]), axis=1)
        is_shared = (np.bincount(pairs[0], minlength=blocks) > 1)[self.ids.values]
        gap = self.at_sec[-1] / max(len(self) - 1, 1) / factor
        copies = range(factor)
        at = np.concatenate([self.at_sec + copy * gap for copy in copies])
        of_a_copy = np.where(is_shared, 0, blocks)
        values = np.concatenate([self.ids.values + copy * of_a_copy for copy in copies])
        ids = Ids(values, offsets(np.tile(self.ids.lengths, factor)))
        order = np.argsort(at, kind="stable")
        return replace(
            self,
            at_sec=at[order],
            input_tokens=np.tile(self.input_tokens, factor)[order],
            output_tokens=np.tile(self.output_tokens, factor)[order],
            ids=_numbered(ids.take(order)),
        )


def read(session: Session, block_size: int | None = None, users: int = 1) -> Load:
    """The requests of the session that ended, without its warm-up.

    Args:
        session: the session.
        block_size: tokens that an id is to stand for; None for the recorded blocks'.
        users: so many times as many conversations (``Load.with_users``).

    Raises:
        SessionError: a table cannot be read, or there is no request.

    """
    counted = _counted(_told_apart(session, of_session(session)))
    ran = counted.take(np.flatnonzero(counted.computed_tokens > 0))
    if not len(ran):
        raise NothingToTry(f"{session.directory}: no request was admitted, so there is no load")
    load = _of_workload(ran, tuple(_notes(counted, ran)))
    if block_size is not None and block_size != load.block_size:
        load = _resized(load, ran.resized(block_size))
    return load if users == 1 else load.with_users(users, _conversations(ran))


def _counted(workload: Workload) -> Workload:
    return workload.take(np.flatnonzero(workload.counts))


def _resized(load: Load, workload: Workload) -> Load:
    """The load with other blocks, and a note on what is shared no more."""
    resized = _of_workload(workload, load.notes)
    if resized.shared_tokens == load.shared_tokens:
        return resized
    note = (
        f"in blocks of {resized.block_size:,} tokens, prompts share {resized.shared_tokens:,} "
        f"tokens of the {load.shared_tokens:,} that they share in the recorded blocks of "
        f"{load.block_size:,}"
    )
    return replace(resized, notes=(*resized.notes, note))


def _conversations(ran: Workload) -> Ints:
    """For each request, the first one of its conversation."""
    found = np.empty(len(ran), np.int64)
    for rank in ran.engines:
        own = np.flatnonzero(ran.engine == rank)
        found[own] = own[turns(ran.of_engine(rank)).first]
    return found


def _told_apart(session: Session, workload: Workload) -> Workload:
    """The same contents are the same on two engines only where their ids compare."""
    if len(workload.engines) < 2 or flag(session.metadata.get("content_ids_shared")):
        return workload

    def apart(ids: Ids) -> Ids:
        own = ids.values * _ENGINES + workload.engine[ids.rows]
        return Ids(np.where(ids.values < 0, ids.values, own), ids.offsets)

    return replace(
        workload, prompt_ids=apart(workload.prompt_ids), output_ids=apart(workload.output_ids)
    )


def _of_workload(ran: Workload, notes: tuple[str, ...]) -> Load:
    return Load(
        block_size=ran.block_size,
        at_sec=ran.arrival_sec - ran.arrival_sec[0],
        input_tokens=ran.input_tokens,
        # An engine gives one token at least.
        output_tokens=np.maximum(ran.output_tokens, 1),
        ids=_numbered(ran.prompt_ids),
        notes=notes,
    )


def _notes(counted: Workload, ran: Workload) -> Iterator[str]:
    if left := len(counted) - len(ran):
        yield f"{left:,} requests are left out, which went away before they were admitted"
    if not ran.has_contents:
        yield "contents were not recorded, so no two prompts share a block"
    full = ran.prompt_ids.head(ran.input_tokens // ran.block_size).values
    answers = np.intersect1d(full[full >= 0], ran.output_ids.values)
    if len(answers):
        yield (
            f"{len(answers) * ran.block_size:,} tokens of prompts were answers before: the new "
            "answers are others, so these tokens are computed once more"
        )
    if (ran.tenant >= 0).any() or len(np.unique(ran.priority)) > 1:
        yield "priorities and cache salts are not sent; contents of two salts stay apart"


def _first_rows(ids: Ids) -> Ints:
    """For each value, the number of the first list that has it."""
    _, at, inverse = np.unique(ids.values, return_index=True, return_inverse=True)
    return np.asarray(ids.rows[at][inverse.ravel()], np.int64)


def _numbered(ids: Ids) -> Ids:
    """The same lists, with numbers from 0 on by first appearance."""
    _, at, inverse = np.unique(ids.values, return_index=True, return_inverse=True)
    rank = np.empty(len(at), np.int64)
    rank[np.argsort(at)] = np.arange(len(at))
    return Ids(rank[inverse.ravel()], ids.offsets)
