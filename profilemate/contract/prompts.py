# SPDX-License-Identifier: Apache-2.0
"""Which tokens has a prompt, and where do two prompts part?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from analysis.errors import RuleError

SHOWN = 40
"""Characters, or 8 tokens, that a message shows before and after the place."""
_SHOWN_TOKENS = 8

Given = str | Sequence[int]
"""A prompt as the user gives it: a text, or the ids of its tokens."""
Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Prompt:
    """The ids of a prompt's tokens, and its text where it was given as one."""

    tokens: tuple[int, ...]
    text: str | None = None


def read(given: Sequence[Given], tokenize: Tokenize | None) -> tuple[Prompt, ...]:
    """The prompts with their tokens.

    Args:
        given: texts, or lists of token ids.
        tokenize: gives the token ids of a text, as ``tokenizer.encode`` does.

    Raises:
        RuleError: there is no prompt, one is empty, or a text comes without ``tokenize``.

    """
    if not given:
        raise RuleError("there is no prompt; give a list of texts, or of lists of token ids")
    return tuple(_read(number, prompt, tokenize) for number, prompt in enumerate(given))


def _read(number: int, prompt: Given, tokenize: Tokenize | None) -> Prompt:
    text = prompt if isinstance(prompt, str) else None
    if isinstance(prompt, str):
        if tokenize is None:
            raise RuleError(
                f"prompt {number} is a text: set kv.tokenize, such as to your tokenizer's encode"
            )
        prompt = tokenize(prompt)
    tokens = tuple(prompt)
    if not tokens:
        raise RuleError(f"prompt {number} has no token")
    if not all(isinstance(token, int) and token >= 0 for token in tokens):
        raise RuleError(f"prompt {number} has a token that is no whole number from 0 on")
    return Prompt(tokens, text)


def shared_tokens(first: Prompt, second: Prompt) -> int:
    """How many tokens both begin with."""
    return _common(first.tokens, second.tokens)


def _common(first: Sequence[object], second: Sequence[object]) -> int:
    shortest = min(len(first), len(second))
    return next((at for at in range(shortest) if first[at] != second[at]), shortest)


def parting(prompts: Sequence[Prompt], first: int, second: int, block_size: int) -> str:
    """Where two prompts part, in a few lines."""
    one, other = prompts[first], prompts[second]
    at = shared_tokens(one, other)
    block, inside = divmod(at, block_size)
    before, after = _texts(one, other) or _tokens(one, other, at)
    return (
        f"prompts {first} and {second} part at token {at:,}: token {inside} of block {block:,}, "
        f"so {block * block_size:,} tokens can be found in the cache\n"
        f"  prompt {first}: {before}\n"
        f"  prompt {second}: {after}"
    )


def _texts(one: Prompt, other: Prompt) -> tuple[str, str] | None:
    if one.text is None or other.text is None:
        return None
    at = _common(one.text, other.text)
    before = one.text[max(0, at - SHOWN) : at]
    return _shown(before, one.text[at : at + SHOWN]), _shown(before, other.text[at : at + SHOWN])


def _shown(before: str, after: str) -> str:
    return f"{before!r} | {after!r}"


def _tokens(one: Prompt, other: Prompt, at: int) -> tuple[str, str]:
    def shown(prompt: Prompt) -> str:
        before = prompt.tokens[max(0, at - _SHOWN_TOKENS) : at]
        return f"{[*before]} | {[*prompt.tokens[at : at + _SHOWN_TOKENS]]}"

    return shown(one), shown(other)


def best_shared(prompts: Sequence[Prompt]) -> list[tuple[int, int]]:
    """For each prompt, the most tokens that it shares with one before it, and that one's number;
    (0, -1) where there is none."""
    found = []
    for number, prompt in enumerate(prompts):
        shared = [(shared_tokens(prompts[other], prompt), other) for other in range(number)]
        found.append(max(shared, key=lambda pair: pair[0], default=(0, -1)))
    return found
