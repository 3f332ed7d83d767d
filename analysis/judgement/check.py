# SPDX-License-Identifier: Apache-2.0
"""Does a session pass: are its measures within the limits, and no worse than a baseline's?"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from analysis.errors import RuleError
from analysis.judgement import comparison, measures
from analysis.judgement.measures import Measure
from analysis.summary import About, Summary

Comparator = Literal["<", "<=", ">", ">=", "==", "!="]

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_RULE = re.compile(
    r"\s*([A-Za-z]\w*(?:\{[^{}]*\})?)\s*(<=|>=|==|!=|<|>)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(%|[a-z]*)\s*",
    re.ASCII,
)
_UNITS = {
    "share": {"%": 0.01},
    "%": {"%": 1.0},
    "s": {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0},
}
"""By unit of a measure, the units that a limit may have, and their factors."""


@dataclass(frozen=True)
class Rule:
    """A session fails the rule if ``measure comparator limit`` is true."""

    measure: Measure
    comparator: str
    limit: float
    text: str


@dataclass(frozen=True)
class Result:
    """The result of one rule.

    ``value``: the session's. ``fails_if``: the rule. ``limit``: the number in it, None where the
    baseline has no value. ``baseline``: the baseline's value, None for a rule without a baseline.
    ``reason``: why it failed, where the figures do not show it.
    """

    measure: str
    unit: str
    failed: bool
    value: float | None
    fails_if: str
    limit: float | None
    baseline: float | None
    reason: str | None


@dataclass(frozen=True)
class Checked:
    """``passed``: no rule failed. ``results``: of every rule in the given order, then of those
    against the baseline. ``doubts``: why the baseline cannot be compared with the session."""

    session: About
    baseline: About | None
    passed: bool
    doubts: tuple[str, ...]
    results: tuple[Result, ...]


def rule(text: str) -> Rule:
    """The rule in a text such as ``hit_rate<0.4`` or ``hit_rate < 40 %``.

    Raises:
        RuleError: the text is no rule.

    """
    match = _RULE.fullmatch(text)
    if match is None:
        raise RuleError(
            f"{text!r} is not a rule; write a measure, <, <=, >, >=, == or !=, and a number, "
            "such as 'hit_rate<0.4' or 'preemptions>0'"
        )
    name, comparator, number, unit = match.groups()
    measure = measures.by_name(name)
    factors = {"": 1.0, **_UNITS.get(measure.unit, {})}
    if unit not in factors:
        known = " or ".join(factor for factor in factors if factor)
        allowed = f"it can be in {known}" if known else "write a plain number"
        raise RuleError(f"{text!r}: {name} cannot be in {unit!r}; {allowed}")
    limit = float(number) * factors[unit]
    _check_limit(text, measure, limit)
    return Rule(measure, comparator, limit, " ".join(text.split()))


def _check_limit(text: str, measure: Measure, limit: float) -> None:
    """Refuse a limit that no value can reach: every session would pass, or fail."""
    most = {"share": 1.0, "%": 100.0}.get(measure.unit, math.inf)
    if not math.isfinite(limit):
        raise RuleError(f"{text!r}: the limit is too large a number")
    if limit > most:
        percent = 100 * limit / most
        meant = "write 0.4 or 40%" if measure.unit == "share" else "write 40 or 40%"
        raise RuleError(
            f"{text!r}: {measure.name} is at most 100 %, and the limit would be {percent:g} %; "
            f"{meant} for 40 percent"
        )


def directed(only: Sequence[str] = ()) -> list[Measure]:
    """The measures to compare with a baseline: those with these names, or all with a direction.

    Raises:
        RuleError: there is no such measure, or it has no direction.

    """
    chosen = [measures.by_name(name) for name in only] or [
        measure for measure in measures.CATALOGUE if measure.better is not None
    ]
    for measure in chosen:
        if measure.better is None:
            raise RuleError(
                f"{measure.name} has no direction, so it cannot be worse than a baseline's; "
                f"give it a limit instead: --fail-if '{measure.name}>...'"
            )
    return chosen


def check(
    found: Summary,
    fail_if: Iterable[str] = (),
    *,
    baseline: Summary | None = None,
    tolerance: float = 0.0,
    only: Sequence[str] = (),
) -> Checked:
    """Check a session.

    Args:
        found: the session.
        fail_if: rules, as ``rule`` takes them. The session fails a rule that is true.
        baseline: a session; no measure with a direction may be worse than its.
        tolerance: how much worse a measure may be, as a share of the baseline's value (0 to 1).
        only: names of the measures to compare with the baseline; all with a direction if empty.

    Raises:
        RuleError: a rule or a name makes no sense.

    """
    results = [_result(stated, found) for stated in map(rule, fail_if)]
    if baseline is not None:
        results += _against(found, baseline, tolerance, only)
    return Checked(
        session=found.session,
        baseline=None if baseline is None else baseline.session,
        passed=not any(result.failed for result in results),
        doubts=()
        if baseline is None
        else tuple(comparison.doubts(baseline, found, "the baseline", "the session")),
        results=tuple(results),
    )


def _result(stated: Rule, found: Summary) -> Result:
    value = stated.measure.of(found)
    return Result(
        measure=stated.measure.name,
        unit=stated.measure.unit,
        failed=value is None or _COMPARE[stated.comparator](value, stated.limit),
        value=value,
        fails_if=stated.text,
        limit=stated.limit,
        baseline=None,
        reason="the session has no value for it" if value is None else None,
    )


def _against(
    found: Summary, baseline: Summary, tolerance: float, only: Sequence[str]
) -> list[Result]:
    return [
        result
        for measure in directed(only)
        for result in _held_against(measure, found, baseline, tolerance, bool(only))
    ]


def _held_against(
    measure: Measure, found: Summary, baseline: Summary, tolerance: float, is_named: bool
) -> list[Result]:
    """The result of one measure; none where a value is missing and no name asked for it."""
    value, base = measure.of(found), measure.of(baseline)
    lower = measure.better == "lower"
    comparator = ">" if lower else "<"
    if value is None or base is None:
        if not is_named:
            return []
        who = "the session" if value is None else "the baseline"
        text = f"{measure.name} {comparator} baseline"
        reason = f"{who} has no value for it"
        return [Result(measure.name, measure.unit, True, value, text, None, base, reason)]
    allowed = tolerance * abs(base)
    limit = base + allowed if lower else base - allowed
    worse = value > limit if lower else value < limit
    # 0.8 - 0.25 * 0.8 is a little more than 0.6, which is not worse.
    failed = worse and not math.isclose(value, limit, rel_tol=1e-9)
    text = f"{measure.name} {comparator} baseline {'+' if lower else '-'} {100 * tolerance:g} %"
    return [Result(measure.name, measure.unit, failed, value, text, limit, base, None)]
