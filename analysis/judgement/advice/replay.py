# SPDX-License-Identifier: Apache-2.0
"""Does the number that an advice names hold in a replay of this very session, and if not, which
one does?

The search is a bisection. It takes for granted that a value between one that does and one that
does not lies on one side of a border, as it is with pools: the number found has been tried, and so
has a slightly smaller one that does not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from analysis.judgement.advice.candidate import Aim, Candidate, Setting
from analysis.summary import Advice, Effect, Known
from analysis.whatif.outcome import Outcome
from analysis.wording.formats import number, seconds

AS_MEASURED = 0.05
"""A replay of the recorded configuration is like the session if its hit rate is off by no more."""
WITHIN = 2.0
"""The same for preemptions and queues: by no more than this factor."""
FINE = 256
"""A border is known well enough within this part of the number."""

NO_VLLM = "vLLM is not installed here, so its scheduler could not try this number."

FIGURES = ("preemptions", "recomputed_tokens", "hit_rate", "evictions", "queue_mean_sec")


class NoReplay(Exception):  # noqa: N818 - it says what is not known, and is no error
    """There is no replay, or no further one; says why in a sentence."""


class Replayer(Protocol):
    """What gives the outcomes of other configurations."""

    @property
    def known(self) -> Known: ...

    def recorded(self, setting: Setting, value: int) -> Outcome:
        """The recorded configuration, replayed. What may be tried next is named, as two
        configurations can take the time of one.

        Raises:
            NoReplay: the session cannot be replayed, or not in time.

        """

    def most(self, setting: Setting) -> int:
        """The largest value of the setting that makes sense for these requests."""

    def tried(self, setting: Setting, values: Sequence[int]) -> Sequence[Outcome | None]:
        """The outcome with each value; None where vLLM refuses it.

        Raises:
            NoReplay: no outcome came in time.

        """

    def at_once(self) -> int:
        """How many values are tried in the time of one."""


@dataclass
class _Search:
    """What was tried of one candidate."""

    candidate: Candidate
    replayer: Replayer
    before: Outcome
    outcomes: dict[int, Outcome | None] = field(default_factory=dict)

    def holds(self, value: int) -> bool:
        after = self.outcomes.get(value)
        return after is not None and all(aim.met(self.before, after) for aim in self.candidate.aims)

    def run(self, values: Sequence[int]) -> None:
        new = [value for value in dict.fromkeys(values) if value not in self.outcomes]
        if new:
            found = self.replayer.tried(self.candidate.setting, new)
            self.outcomes.update(zip(new, found, strict=True))

    def smallest(self) -> int | None:
        """The smallest value so far that does; None for none."""
        found = [value for value in self.outcomes if self.holds(value)]
        if self.candidate.others is not None:
            # The first one of those that change less.
            order = (self.candidate.value, *self.candidate.others)
            found.sort(key=order.index)
            return found[0] if found else None
        return min(found, default=None)


def confirmed(
    candidate: Candidate, exact: Replayer | None, modelled: Replayer | None
) -> Advice | None:
    """The advice with a number that a replay confirms; None where it is refuted.

    Args:
        candidate: the advice and its first number.
        exact: knows every figure; None where it must not be used.
        modelled: knows what pools of other sizes find. It is asked where that is all that counts,
            and where the exact one cannot answer.

    """
    ways = _ways(candidate, exact, modelled)
    is_whole = any(aims == candidate.aims for _, aims in ways)
    remark = None if is_whole else NO_VLLM
    for replayer, aims in ways:
        is_sure = aims == candidate.aims
        asked = replace(candidate, aims=aims, sure=candidate.sure if is_sure else "medium")
        try:
            before = replayer.recorded(candidate.setting, candidate.value)
            _check_likeness(aims, before)
        except NoReplay as why:
            remark = f"{why}"
            continue
        search = _Search(asked, replayer, before)
        try:
            found = _search(search)
            return _refuted(search) if found is None else _published(search, found, remark)
        except NoReplay as why:
            remark = f"{why}"
            best = search.smallest()
            if best is not None:
                return _published(search, best, f"{why} A smaller number may do.")
            if candidate.value in search.outcomes:
                said = f"{why} No number was confirmed until then."
                return replace(candidate.write(None), confidence="low", remark=said)
    return replace(candidate.advice, remark=remark)


def _ways(
    candidate: Candidate, exact: Replayer | None, modelled: Replayer | None
) -> list[tuple[Replayer, tuple[Aim, ...]]]:
    """The ways to replay, the best one first, and the aims that each one can judge."""
    found = tuple(aim for aim in candidate.aims if aim.figure == "hit_rate")
    by_model = found if candidate.setting == "num_blocks" else ()
    ways = []
    if exact is not None and by_model != candidate.aims:
        ways.append((exact, candidate.aims))
    if modelled is not None and by_model:
        ways.append((modelled, by_model))
    return ways


def _search(search: _Search) -> int | None:
    """The number to advise; None where none does."""
    candidate = search.candidate
    search.run([candidate.value])
    if search.holds(candidate.value):
        return candidate.value
    if candidate.others is not None:
        search.run(candidate.others)
        return search.smallest()
    low, high, grain = 0, _steps_up(search), candidate.grain

    def value(step: int) -> int:
        return candidate.value + step * grain

    # A small step up does more often than the largest one.
    search.run([value(step) for step in sorted({min(high, _double(candidate)), high}) if step])
    found = search.smallest()
    if found is None:
        return None
    high = (found - candidate.value) // grain
    low = max((tried - candidate.value) // grain for tried in search.outcomes if tried < found)
    while (high - low) * grain > max(grain, value(high) // FINE):
        parts = min(search.replayer.at_once(), high - low - 1) + 1
        search.run([value(low + (high - low) * part // parts) for part in range(1, parts)])
        for step in range(low + 1, high):
            if value(step) not in search.outcomes:
                continue
            if search.holds(value(step)):
                high = step
                break
            low = step
    return value(high)


def _steps_up(search: _Search) -> int:
    candidate = search.candidate
    most = search.replayer.most(candidate.setting)
    return max(0, -(-(most - candidate.value) // candidate.grain))


def _double(candidate: Candidate) -> int:
    """Steps from the candidate's number to twice the number."""
    return -(-candidate.value // candidate.grain)


def _published(search: _Search, value: int, remark: str | None) -> Advice:
    after = search.outcomes[value]
    assert after is not None
    return replace(
        search.candidate.write(value),
        confidence=search.candidate.sure,
        known=search.replayer.known,
        effects=effects(search.before, after, search.candidate.aims),
        remark=remark,
    )


def _refuted(search: _Search) -> Advice | None:
    candidate = search.candidate
    if not candidate.without:
        return None
    tried = max((value for value, outcome in search.outcomes.items() if outcome), default=0)
    said = f"No number up to {tried:,} does it in a replay, so none is named."
    return replace(candidate.write(None), confidence="low", remark=said)


def _check_likeness(aims: Sequence[Aim], before: Outcome) -> None:
    """Raise NoReplay where the replay of the recorded configuration is unlike the session."""
    for aim in aims:
        if aim.measured is None or (not aim.measured and aim.figure != "hit_rate"):
            continue
        if aim.figure == "hit_rate":
            off = abs(before.hit_tokens - aim.measured) > AS_MEASURED * before.query_tokens
            was, measured = f"{before.hit_tokens:,} tokens found", f"{aim.measured:,.0f}"
        else:
            found = getattr(before, aim.figure) or 0.0
            off = not (found and 1 / WITHIN <= found / aim.measured <= WITHIN)
            if aim.figure == "queue_mean_sec":
                off = off and abs(found - aim.measured) > _two_steps(before)
            write, what = (
                (number, "preemptions")
                if aim.figure == "preemptions"
                else (seconds, "in the queue")
            )
            was, measured = f"{write(found)} {what}", write(aim.measured)
        if off:
            raise NoReplay(
                f"A replay of the recorded configuration is unlike the session: {was} in place "
                f"of {measured}."
            )


def _two_steps(before: Outcome) -> float:
    """Seconds. When a request came is known to a step, and so is its admission."""
    return 2 * (before.span_sec or 0.0) / (before.steps or 1)


def effects(before: Outcome, after: Outcome, aims: Sequence[Aim]) -> tuple[Effect, ...]:
    """The figures that both outcomes have and that are not 0 in both.

    Waiting depends on what a step takes, so it is one only where it is aimed at: then it was held
    against the session.
    """
    aimed = {aim.figure for aim in aims}
    names = [name for name in FIGURES if name != "queue_mean_sec" or name in aimed]
    pairs = ((name, getattr(before, name), getattr(after, name)) for name in names)
    return tuple(
        Effect(name, was, will)
        for name, was, will in pairs
        if was is not None and will is not None and (was or will)
    )
