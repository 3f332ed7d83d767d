# SPDX-License-Identifier: Apache-2.0
"""What is known of a session, and what follows from it."""

from __future__ import annotations

from dataclasses import replace

from analysis import passes
from analysis.judgement import advice, consistency, findings
from analysis.judgement.advice import Candidate, Replayer
from analysis.summary import Summary
from analysis.tables.session import Session


def summarize(session: Session) -> Summary:
    """Everything that the session's tables say about its KV cache and its CUDA graphs.

    Its advice is estimated, or modelled where the figures of the summary do for that: nothing is
    replayed.

    Raises:
        SessionError: a table cannot be read, or a line of it is malformed.

    """
    found = passes.measure(session)
    doubts = consistency.contradictions(found)
    found = replace(found, warnings=(*found.warnings, *doubts))
    return replace(
        found, findings=findings.find(found), advice=advice.advise(found, doubtful=bool(doubts))
    )


def to_replay(summary: Summary) -> bool:
    """Whether the advice names a number that a replay can confirm or refute."""
    is_sure = not consistency.contradictions(summary)
    return is_sure and any(isinstance(one, Candidate) for one in advice.candidates(summary))


def replayed(summary: Summary, exact: Replayer | None, modelled: Replayer | None) -> Summary:
    """The same summary, with advice whose numbers were tried in a replay.

    Args:
        summary: of the session that the replayers are of.
        exact: replays requests through vLLM's scheduler.
        modelled: models the cache alone.

    """
    doubts = consistency.contradictions(summary)
    found = advice.advise(summary, doubtful=bool(doubts), exact=exact, modelled=modelled)
    return replace(summary, advice=found)
