# SPDX-License-Identifier: Apache-2.0
"""The words around a piece of advice."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.summary import Advice, Effect, Finding
from analysis.wording.formats import number, seconds, share


def none(findings: Sequence[Finding], warnings: Sequence[str]) -> str:
    """What stands in the place of advice where there is none."""
    if findings:
        return "No setting is known to mend what was found."
    if warnings:
        return "No advice: the warnings come first."
    return "Nothing in this session asks for another setting."


def setting(flag: str | None, value: str | None) -> str:
    """The flag and its value as ``vllm serve`` takes them; empty where no flag does it."""
    return f"{flag} {value or ''}".strip() if flag else ""


_KNOWN = {
    "replayed": "replayed through vLLM's scheduler",
    "modelled": "modelled",
    "estimated": "estimated, not replayed",
}

_FIGURES = {
    "preemptions": ("preemptions", number),
    "recomputed_tokens": ("tokens computed again because of them", number),
    "hit_rate": ("hit rate", share),
    "evictions": ("evictions", number),
    "queue_mean_sec": ("mean time in the queue", seconds),
    "can_never_run": ("requests that can never run", number),
    "empty_share": ("empty slots", share),
    "graph_share": ("executions in a graph", share),
    "without_full_graph": ("batches of decodes without a FULL graph", number),
    "padding_share": ("padding", share),
}


def known(one: Advice) -> str:
    """How the effect of the advice is known, and what it is."""
    found = _KNOWN[one.known]
    if one.effects:
        found += f": {'; '.join(map(_effect, one.effects))}"
    return f"{found}. {one.remark}" if one.remark else found


def _effect(effect: Effect) -> str:
    words, shown = _FIGURES[effect.figure]
    return f"{words} {shown(effect.before)} -> {shown(effect.after)}"
