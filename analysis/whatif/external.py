# SPDX-License-Identifier: Apache-2.0
"""What did a KV connector's hits save?"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.tables.facts import Facts
from analysis.tables.session import Session
from analysis.whatif import step_time
from analysis.whatif.host_memory import Confidence, confidence


@dataclass(frozen=True)
class External:
    """``loaded_tokens``: that a KV connector found for requests as they were admitted, after a
    preemption, too. ``compute_sec``: what computing them would have taken, by the time of a prefill
    token in this session's steps; ``confidence``: of that time; both None where it is not known.
    ``wait_request_sec``: how long requests waited for the connector, as requests times seconds;
    this is inferred (``analysis.requests.waiting``).
    """

    loaded_tokens: int
    compute_sec: float | None
    confidence: Confidence | None
    wait_request_sec: float


def measure(session: Session, facts: Facts, wait_request_sec: float) -> External | None:
    """What was saved; None where no connector found anything.

    Args:
        session: the session.
        facts: its facts.
        wait_request_sec: as ``External`` has it.

    Raises:
        SessionError: a table cannot be read.

    """
    found = session.collect(
        "prefix_cache_lookups",
        lambda table: table.filter(pl.col("admitted") == 1).select(
            pl.col("external_hit_tokens").sum()
        ),
    )
    tokens = int(found.item() or 0)
    if not tokens:
        return None
    known = step_time.fit(session, batches=facts.batches)
    token_sec = known.prefill_token_sec if known else 0.0
    return External(
        loaded_tokens=tokens,
        compute_sec=tokens * token_sec if token_sec else None,
        confidence=confidence(known) if known and token_sec else None,
        wait_request_sec=wait_request_sec,
    )
