# SPDX-License-Identifier: Apache-2.0
"""What a miss-ratio curve says, in sentences: the same in every renderer."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.whatif.curve import LRU, Curve, Point, Verdict
from analysis.wording.formats import counted, share


def sentences(found: Curve) -> Iterator[str]:
    """What holds the hit rate back, how much more there is to gain, and with how many blocks."""
    yield from _held_back(found)
    yield _enough(found)
    yield from _check(found)


def _held_back(found: Curve) -> Iterator[str]:
    point = found.at_measured
    if point is None or point.verdict is None:
        return
    verdict, now = point.verdict, point.outcome(LRU)
    blocks = counted(point.pool.num_blocks, "block")
    rate = share(now.hit_rate if now else None)
    most = f"no pool finds more than {share(found.ceiling.hit_rate)}"
    if verdict.by == "resets":
        dropped = share(found.ceiling.dropped_tokens / found.ceiling.query_tokens)
        yield (
            f"Resets hold the hit rate back, or evictions on request: with {blocks} it is {rate}, "
            f"and {most} (modelled). What they dropped and prompts asked for again is {dropped} of "
            "the prompt tokens."
        )
        return
    if verdict.by == "workload":
        yield (
            f"Nothing holds the hit rate back: with {blocks} it is {rate}, and {most} "
            "(modelled). What is not found has not been there before."
        )
        return
    best = share((found.ceiling.hit_rate or 0.0) - verdict.lost_to_capacity)
    what = "Capacity" if verdict.by == "capacity" else "The eviction policy"
    yield (
        f"{what} holds the hit rate back: with {blocks} it is {rate} under LRU, which is vLLM's "
        f"rule; evicting what is needed latest would make it {best}, and {most} (modelled)."
    )
    yield _best_rule(point)
    if verdict.by == "policy":
        yield _instead(found, verdict)


def _instead(found: Curve, verdict: Verdict) -> str:
    """What can be done about a rule that cannot be changed.

    What a larger pool is to find is more than this one finds under LRU.
    """
    has_better = verdict.best_policy != LRU
    bound = (found.ceiling.hit_rate or 0.0) - verdict.lost_to_capacity
    most, what = (verdict.best_hit_rate, "") if has_better else (bound, " as that bound")
    for larger in sorted(found.points, key=lambda each: each.pool.num_blocks):
        under_lru = larger.outcome(LRU)
        finds = under_lru.hit_rate if under_lru else None
        if finds is not None and finds >= most:
            return (
                f"vLLM has no flag for another rule, but a larger pool finds as much{what}: "
                f"{counted(larger.pool.num_blocks, 'block')} find {share(finds)} under LRU."
            )
    return "vLLM has no flag for another rule."


def _best_rule(point: Point) -> str:
    """Belady's bound knows the future: what can be had without."""
    verdict = point.verdict
    if verdict is None or len(point.outcomes) < 3:
        return "Evicting what is needed latest takes knowing the future: a bound, not a choice."
    if verdict.best_policy == LRU:
        return "Of the rules that do not know the future, none of those tried finds more than LRU."
    return (
        f"Of the rules that do not know the future, {verdict.best_policy} finds most: "
        f"{share(verdict.best_hit_rate)}."
    )


def _enough(found: Curve) -> str:
    if not found.enough_blocks:
        return "No pool finds anything: no request has a full block in common with an earlier one."
    return (
        f"Nothing more is to be gained beyond {counted(found.enough_blocks, 'block')} under LRU; "
        f"{found.nearly_blocks:,} give 99 % of it (modelled)."
    )


def _check(found: Curve) -> Iterator[str]:
    """The model against the truth, where there is one."""
    now = found.at_measured.outcome(LRU) if found.at_measured else None
    was = found.measured
    if now is None or was is None or now.hit_rate is None or was.hit_rate is None:
        return
    points = 100 * (now.hit_rate - was.hit_rate)
    yield (
        f"The session's own hit rate was {share(was.hit_rate)} (measured): the model is "
        f"{abs(points):.2f} points {'above' if points > 0 else 'below'} it."
    )
