# SPDX-License-Identifier: Apache-2.0
"""A chat template: how an application makes a prompt of a conversation."""

from __future__ import annotations

from collections.abc import Sequence

RULES = (
    "You are the assistant of a shop for bicycles. Answer in the customer's language, in at most "
    "three sentences. Never promise a date of delivery. Prices are in euros, with tax. If you do "
    "not know an answer, say so and give the telephone number of the shop.\n"
)
Turn = tuple[str, str]
"""Who speaks, and what."""


def prompt(turns: Sequence[Turn], now: str) -> str:
    """The rules come first: they are the same for all, so the cache computes them once."""
    said = "".join(f"<{who}>{what}</{who}>\n" for who, what in turns)
    return f"{RULES}{said}<time>{now}</time>\n<assistant>"


def prompt_with_the_time_first(turns: Sequence[Turn], now: str) -> str:
    """The same words in another order. Every prompt is new from its first tokens on."""
    said = "".join(f"<{who}>{what}</{who}>\n" for who, what in turns)
    return f"<time>{now}</time>\n{RULES}{said}<assistant>"
