# SPDX-License-Identifier: Apache-2.0
"""How did the session draft tokens?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from analysis.tables.facts import Facts

HIDDEN_STATES = ("eagle", "eagle3", "mtp", "dflash", "dspark")
"""Methods whose drafters read the model's hidden states, as vLLM's ``use_eagle`` has them."""


@dataclass(frozen=True)
class Speculation:
    """``tokens``: drafted for each step. ``method``: vLLM's name. The others are those of
    ``analysis.tables.facts.Scheduler``."""

    tokens: int
    method: str
    drops_hit_unit: bool
    draft_slots: int
    lookahead_tokens: int


def of_session(facts: Facts) -> Speculation | None:
    """How the session drafted; None where it did not, or where it is not known well enough."""
    found = facts.scheduler
    if not found.speculative_tokens or found.speculative_method is None:
        return None
    if found.drops_hit_unit is None or found.draft_slots is None or found.lookahead_tokens is None:
        return None
    return Speculation(
        found.speculative_tokens,
        found.speculative_method,
        found.drops_hit_unit,
        found.draft_slots,
        found.lookahead_tokens,
    )


def notes(facts: Facts) -> Iterator[str]:
    """What is not known of the session's speculation."""
    count, found = facts.scheduler.speculative_tokens, of_session(facts)
    if found is not None:
        yield (
            f"speculative decoding ({count} tokens): which drafts were accepted is not recorded; "
            "each answer takes as many steps as it took, and its tokens are spread evenly over them"
        )
        if "ngram" in found.method or "suffix" in found.method:
            yield f"{found.method} may draft less than {count} tokens; simulated with all of them"
    elif count:
        yield (
            f"speculative decoding ({count} tokens) is not simulated, as the session does not say "
            "how it drafted: each step gives a request one token, so there are too many steps, and "
            "waiting is too long"
        )
