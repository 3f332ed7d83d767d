# SPDX-License-Identifier: Apache-2.0
"""What is known of a session, and what follows from it."""

from __future__ import annotations

from dataclasses import replace

from analysis import passes
from analysis.judgement import advice, consistency, findings
from analysis.summary import Summary
from analysis.tables.session import Session


def summarize(session: Session) -> Summary:
    """Everything that the session's tables say about its KV cache and its CUDA graphs.

    Raises:
        SessionError: a table cannot be read, or a line of it is malformed.

    """
    found = passes.measure(session)
    doubts = consistency.contradictions(found)
    found = replace(found, warnings=(*found.warnings, *doubts))
    return replace(
        found, findings=findings.find(found), advice=advice.advise(found, doubtful=bool(doubts))
    )
