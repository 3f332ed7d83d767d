# SPDX-License-Identifier: Apache-2.0
"""What does a scheduler have to know of a drafter, and what do drafts give?

The scheduler needs no drafter: it asks its configuration how many tokens are drafted, and what the
method needs of the cache. A model of its own stands in for every method, with the session's answers
to these questions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis.whatif.speculation import HIDDEN_STATES, Speculation

_ROUNDING = 1e-9


def arguments(model: Path, speculation: Speculation | None) -> dict[str, Any]:
    """What ``parts.build_scheduler`` needs for drafts; nothing without any."""
    if speculation is None:
        return {}
    return {
        "speculative_config": {
            "method": "draft_model",
            "model": str(model),
            "num_speculative_tokens": speculation.tokens,
        },
        "change": lambda config: _answer_as(config.speculative_config, speculation),
    }


def _answer_as(config: Any, speculation: Speculation) -> None:
    """Let vLLM's settings for drafts answer as the session's would have."""
    reads_states = speculation.method in HIDDEN_STATES
    ahead, tokens = speculation.lookahead_tokens, speculation.tokens
    answers = {
        "use_eagle": reads_states,
        "use_eagle_block_drop": speculation.drops_hit_unit,
        "use_dflash": ahead > tokens,
        "use_dspark": False,
        "uses_draft_model": not reads_states and ahead > 0,
        "use_multi_module_mtp": False,
    }
    methods = {name: lambda _, said=said: said for name, said in answers.items()}
    slots = property(lambda _: speculation.draft_slots)
    kind = type("Drafts", (type(config),), {**methods, "max_num_new_slots_for_drafting": slots})
    config.__class__ = kind


class Acceptance:
    """How many tokens each step gives one request: its answer spread evenly over its steps.

    Args:
        tokens: of the answer, after the first one.
        steps: that these took.

    """

    def __init__(self, tokens: int, steps: float) -> None:
        # An answer without further tokens has no steps.
        self._rate = tokens / steps if steps > 0 else 1.0
        self._due = 0.0

    def next(self, drafts: int) -> int:
        """Tokens of a step with so many drafts: one, and the drafts that are accepted."""
        self._due += self._rate
        given = min(1 + drafts, max(1, int(self._due + _ROUNDING)))
        self._due -= given
        return given


def propose(scheduler: Any, names: list[str], tokens: int) -> None:
    """Tell the scheduler what was drafted after a step, as an engine does."""
    from vllm.v1.outputs import DraftTokenIds

    scheduler.update_draft_token_ids(DraftTokenIds(names, [[0] * tokens for _ in names]))
