# SPDX-License-Identifier: Apache-2.0
"""Does one of vLLM's figures agree with the session's, given what explains a difference?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["equal", "explained", "unexplained", "not comparable"]

_ROUNDING = 1e-6


@dataclass(frozen=True)
class Explanation:
    """What explains some of a difference. ``says``: in words. ``least`` and ``most``: what it adds
    to the session's figure, in the figure's unit; equal where the amount is exact."""

    says: str
    least: float
    most: float


@dataclass(frozen=True)
class Row:
    """One of vLLM's figures beside the session's.

    ``metric``: its name. ``unit``: what it counts. ``vllm``: its value over all engines, None where
    the page has no number. ``session``: the figure of the whole session, None where it has none.
    ``difference``: vLLM's less the session's. ``parts``: what explains it. ``unexplained``: what
    the parts leave of it. ``note``: what else to know of the figure.
    """

    metric: str
    unit: str
    vllm: float | None
    session: float | None
    difference: float | None
    parts: tuple[Explanation, ...]
    unexplained: float | None
    verdict: Verdict
    note: str | None = None


def exact(says: str, amount: float) -> Explanation:
    """An explanation whose amount is known."""
    return Explanation(says, amount, amount)


def within(says: str, least: float, most: float) -> Explanation:
    """An explanation whose amount lies between ``least`` and ``most``."""
    return Explanation(says, least, most)


def row(
    metric: str,
    unit: str,
    vllm: float | None,
    session: float | None,
    parts: Sequence[Explanation],
    note: str | None = None,
) -> Iterator[Row]:
    """The figure's row; none where the page lacks the figure."""
    if vllm is None:
        return
    known = tuple(part for part in parts if part.least or part.most)
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
        # The exact amounts explain all of the difference, so the ranges add nothing.
        known = certain
    left = 0.0 if abs(left) <= rounding else left
    difference = 0.0 if abs(difference) <= rounding else difference
    verdict: Verdict = "unexplained" if left else "explained" if difference else "equal"
    yield Row(
        metric, unit, vllm, session, difference, known if difference else (), left, verdict, note
    )
