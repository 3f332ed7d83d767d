# SPDX-License-Identifier: Apache-2.0
"""The cache finds the rules, and a conversation that goes on. Put ``prompt_with_the_time_first`` in
the place of ``prompt``, and each test says where the prompts part."""

from __future__ import annotations

from typing import Any

import pytest
from chat import RULES, prompt


def tokenize(text: str) -> list[int]:
    """Stands in for your tokenizer's encode: a token for each byte."""
    return list(text.encode())


PROMPTS = [
    prompt([("user", "Do you repair brakes?")], "10:00"),
    prompt([("user", "What does a bell cost?")], "10:01"),
    prompt(
        [
            ("user", "Do you repair brakes?"),
            ("assistant", "Yes, from 30 euros on."),
            ("user", "Also today?"),
        ],
        "10:02",
    ),
]


@pytest.fixture(autouse=True)
def with_tokenizer(kv: Any) -> None:
    kv.tokenize = tokenize


def test_the_rules_are_shared(kv: Any) -> None:
    kv.assert_prefix_shared(PROMPTS, at_least=len(tokenize(RULES)))


def test_the_cache_finds_most_of_it(kv: Any) -> None:
    run = kv.run(PROMPTS, blocks=1000, block_size=16, output_tokens=20)
    assert run.hit_rate > 0.5
    # The third prompt continues the first: it finds more than the rules.
    assert run.hits[2] > run.hits[1]


def test_it_is_as_it_was(kv: Any) -> None:
    run = kv.run(PROMPTS, blocks=1000, block_size=16, output_tokens=20)
    kv.assert_unchanged("conversation", run, PROMPTS)
