# SPDX-License-Identifier: Apache-2.0
"""Which setting would serve this load better, and what says so?

Each rule looks at the summary and gives one piece of advice or none. The rules stand in the order
in which they matter. Of two that would change the same setting the first one counts, so that no
two contradict each other. A number that a replay of the session can try comes as a ``Candidate``:
it is tried before it is advised. Advice names a flag only if the release that ran has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from analysis.judgement.advice import block_size, graphs, pool, traffic, waiting
from analysis.judgement.advice.candidate import Candidate
from analysis.judgement.advice.replay import Replayer, confirmed
from analysis.summary import Advice, Summary

__all__ = ["Advice", "Candidate", "Replayer", "advise", "candidates"]

RULES: tuple[Callable[[Summary], Advice | Candidate | None], ...] = (
    pool.can_never_run,
    pool.preempts_itself,
    graphs.overcommitted,
    pool.more_blocks,
    graphs.none_asked_for,
    block_size.prefix_caching,
    block_size.block_size,
    block_size.fragmentation,
    traffic.same_engine,
    traffic.one_first,
    graphs.decodes_without_full_graphs,
    graphs.larger_graphs,
    waiting.more_requests_at_once,
    waiting.larger_steps,
    waiting.more_adapters,
    waiting.whole_prompts,
    graphs.less_padding,
    graphs.unused_graphs,
    graphs.overestimated,
    traffic.sweepers,
    traffic.what_varies_last,
    pool.larger_than_needed,
)


def advise(
    summary: Summary,
    *,
    doubtful: bool = False,
    exact: Replayer | None = None,
    modelled: Replayer | None = None,
) -> tuple[Advice, ...]:
    """The advice that this session supports, the most important first; often there is none.

    Args:
        summary: what is known of the session, the advice left aside.
        doubtful: the session's tables contradict each other, so that no advice is sure.
        exact: tries numbers before they are advised; without it they are estimates.
        modelled: does the same for what pools of other sizes find.

    """
    given = []
    for found in candidates(summary):
        advice: Advice | None
        if isinstance(found, Candidate):
            tries = not doubtful and (exact is not None or modelled is not None)
            advice = confirmed(found, exact, modelled) if tries else found.advice
        else:
            advice = found
        if advice is not None:
            given.append(_without_unknown_flag(advice, summary))
    if doubtful:
        return tuple(replace(advice, confidence="low") for advice in given)
    return tuple(given)


def candidates(summary: Summary) -> tuple[Advice | Candidate, ...]:
    """What the rules say, and of two rules for the same setting the first one."""
    given: dict[str, Advice | Candidate] = {}
    for rule in RULES:
        found = rule(summary)
        if found is not None:
            about = found.advice.about if isinstance(found, Candidate) else found.about
            given.setdefault(about, found)
    return tuple(given.values())


def _without_unknown_flag(advice: Advice, summary: Summary) -> Advice:
    if advice.flag is None or advice.flag.removeprefix("--") in summary.facts.settings:
        return advice
    return replace(advice, flag=None, value=None)
