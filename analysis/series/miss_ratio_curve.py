# SPDX-License-Identifier: Apache-2.0
"""What would pools of other sizes have found of the prompts of this session?"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.tables.session import Session
from analysis.whatif.curve import BELADY, LRU, Curve

MOST_BLOCKS = 500_000
"""Blocks of all requests together: some seconds of work. ``profilemate whatif --fast`` has no such
limit."""

SIZES = 24


@dataclass(frozen=True)
class MissRatioCurve:
    """``curve``: under vLLM's rule, and at best. ``problem``: why there is no curve, else None."""

    curve: Curve | None
    problem: str | None


def measure(session: Session) -> MissRatioCurve:
    """The curve, from an eighth of the session's pool to beyond the size that finds everything.

    Raises:
        SessionError: a table cannot be read.

    """
    from analysis.whatif import fast, workload

    try:
        found = workload.of_session(session, most_blocks=MOST_BLOCKS)
    except workload.NothingToTry as error:
        return MissRatioCurve(None, str(error))
    if not found.has_contents:
        return MissRatioCurve(None, "Prefix caching was off: no request has a content id.")
    own = found.measured.num_blocks if found.measured else None
    enough = fast.enough(found)
    low = max(1.0, (own or enough) / 8)
    high = max(1.25 * enough, 2 * (own or 1))
    sizes = {round(low * (high / low) ** (number / (SIZES - 1))) for number in range(SIZES)}
    return MissRatioCurve(fast.curve(found, sorted({*sizes, own or 1}), (LRU, BELADY)), None)
