# SPDX-License-Identifier: Apache-2.0
"""What keys are called by which the figures of a session are split."""

from __future__ import annotations

from analysis.requests.by_whom import Share, Split, together

NAMES = {
    "salt": "salt",
    "lora": "adapter",
    "priority": "priority",
    "api-server": "API server",
    "engine": "engine",
    "label": "label",
}
"""Of each kind of key, in the singular."""

POLICIES = {"fcfs": "first come, first served", "priority": "a lower number goes first"}


def named(share: Share, by: str) -> str:
    """The key, or that there is none."""
    return f"no {NAMES[by]}" if share.key is None else share.key


def rows(split: Split, shown: int) -> list[tuple[str, Share]]:
    """The first keys, and behind them all others as one, and what is not known, each with its
    name."""
    if len(split.shares) == shown + 1:
        # One more takes no more room by its name than as the rest.
        shown += 1
    shares = [(named(share, split.by), share) for share in split.shares[:shown]]
    others = [*split.shares[shown:], *filter(None, [split.rest])]
    if others:
        more = split.keys - len(shares)
        shares.append((f"{more:,} more", together(others)))
    if split.not_known is not None:
        shares.append(("not known", split.not_known))
    return shares
