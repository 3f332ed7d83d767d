# SPDX-License-Identifier: Apache-2.0
"""One of vLLM's figures beside the session's, and the parts of their difference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["equal", "explained", "unexplained", "not comparable"]

_ROUNDING = 1e-6


@dataclass(frozen=True)
class Part:
    """A reason for a difference. It adds ``least`` to ``most`` to the session's figure; both are
    the same where the amount is exact."""

    says: str
    least: float
    most: float


@dataclass(frozen=True)
class Row:
    """One of vLLM's figures. ``metric``: its name. ``unit``: what it counts. ``vllm``: its value
    over all engines, None where the page has no number. ``session``: that of the whole session.
    ``difference``: vLLM's less the session's. ``unexplained``: what is left of it without the
    parts. ``note``: what else there is to know about the figure."""

    metric: str
    unit: str
    vllm: float | None
    session: float | None
    difference: float | None
    parts: tuple[Part, ...]
    unexplained: float | None
    verdict: Verdict
    note: str | None = None


def exact(says: str, amount: float) -> Part:
    """A part whose amount is known."""
    return Part(says, amount, amount)


def within(says: str, least: float, most: float) -> Part:
    """A part whose amount is known only as a range."""
    return Part(says, least, most)


def row(
    metric: str,
    unit: str,
    vllm: float | None,
    session: float | None,
    parts: Sequence[Part | None],
    note: str | None = None,
) -> Iterator[Row]:
    """The row of one figure; none where the page does not have the figure."""
    if vllm is None:
        return
    known = tuple(part for part in parts if part is not None and (part.least or part.most))
    if not math.isfinite(vllm):
        note = "the page has no number for it"
        yield Row(metric, unit, None, session, None, (), None, "not comparable", note)
        return
    if session is None:
        yield Row(metric, unit, vllm, None, None, known, None, "not comparable", note)
        return
    difference = vllm - session
    least, most = sum(part.least for part in known), sum(part.most for part in known)
    left = difference - min(max(difference, least), most)
    rounding = _ROUNDING * max(1.0, abs(vllm), abs(session))
    certain = tuple(part for part in known if part.least == part.most)
    if abs(difference - sum(part.most for part in certain)) <= rounding:
        # The exact parts explain all of it, so no range does.
        known = certain
    left = 0.0 if abs(left) <= rounding else left
    difference = 0.0 if abs(difference) <= rounding else difference
    verdict: Verdict = "unexplained" if left else "explained" if difference else "equal"
    yield Row(
        metric, unit, vllm, session, difference, known if difference else (), left, verdict, note
    )
