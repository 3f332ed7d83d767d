# SPDX-License-Identifier: Apache-2.0
"""Which setting would serve this load better, and what says so?

Each rule looks at the summary and gives one piece of advice or none. The rules stand in the order
in which they matter. Of two that would change the same setting the first one counts, so that no
two contradict each other. Advice names a flag only if the release that ran has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from analysis.judgement.advice import block_size, graphs, pool, traffic, waiting
from analysis.summary import Advice, Summary

__all__ = ["Advice", "advise"]

RULES: tuple[Callable[[Summary], Advice | None], ...] = (
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


def advise(summary: Summary, *, doubtful: bool = False) -> tuple[Advice, ...]:
    """The advice that this session supports, the most important first; often there is none.

    ``doubtful``: the session's tables contradict each other, so that no advice is sure.
    """
    given: dict[str, Advice] = {}
    for rule in RULES:
        advice = rule(summary)
        if advice is not None and advice.about not in given:
            given[advice.about] = _without_unknown_flag(advice, summary)
    if doubtful:
        return tuple(replace(advice, confidence="low") for advice in given.values())
    return tuple(given.values())


def _without_unknown_flag(advice: Advice, summary: Summary) -> Advice:
    if advice.flag is None or advice.flag.removeprefix("--") in summary.facts.settings:
        return advice
    return replace(advice, flag=None, value=None)
