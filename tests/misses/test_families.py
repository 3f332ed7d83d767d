# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from analysis import open_session
from analysis.prefix import families
from analysis.prefix.families import Families, Family, TooShort
from analysis.tables import facts
from tests.analysis.builder import METADATA, SessionBuilder

LENGTHS = [16, 32, 48, 64]


@pytest.fixture
def session(tmp_path: Path) -> SessionBuilder:
    built = SessionBuilder(tmp_path / "session")
    built.metadata(prefix_lengths=LENGTHS)
    return built


def found(session: SessionBuilder) -> Families:
    opened = open_session(session.folder)
    return families.measure(opened, facts.read(opened))


def add(session: SessionBuilder, name: str, tokens: int, prefix_ids: list[int]) -> None:
    session.requests({"request_id": name, "input_length": tokens, "prefix_ids": prefix_ids})


def test_a_timestamp_at_token_47(session: SessionBuilder) -> None:
    # Two tenants with a system prompt each. One puts the time between tokens 32 and 48.
    for number in range(20):
        add(session, f"steady-{number}", 64, [1, 2, 3, 4])
        add(session, f"timed-{number}", 64, [1, 12, 100 + number, 200 + number])
    result = found(session)
    assert result.largest == (Family(20, 32, 48, 20, 20 * 32, "timed-0"),)
    # All but the first of each family share: 19 x 64, 19 x 32, and timed-0 the first 16.
    assert (result.sharing, result.shared_tokens) == (39, 19 * 64 + 19 * 32 + 16)


def test_nothing_shared(session: SessionBuilder) -> None:
    for number in range(3):
        add(session, f"{number}", 40, [10 + number, 20 + number])
    result = found(session)
    assert (result.sharing, result.too_short, result.largest) == (0, None, ())


def test_shared_but_shorter_than_a_block(session: SessionBuilder) -> None:
    # Situation 1, smaller: prompts share 48 tokens, a block of this hybrid model has 784.
    session.metadata(
        prefix_lengths=LENGTHS, groups=[{"kind": "FullAttentionSpec", "block_size": 784}]
    )
    for number in range(5):
        add(session, f"{number}", 2_000, [1, 2, 3, 40 + number])
    result = found(session)
    # Blocks of 32 would have found one in each of the 4 that came later.
    assert result.too_short == TooShort(784, 4, 48, 32, 4 * 32)
    assert not result.unit_never_fills


def test_a_block_that_no_request_can_fill(session: SessionBuilder) -> None:
    session.metadata(
        groups=[{"kind": "FullAttentionSpec", "block_size": 784}],
        cache={**METADATA["cache"], "max_model_len": 512},
    )
    assert found(session).unit_never_fills


def test_prompts_that_end_early_do_not_part(session: SessionBuilder) -> None:
    for number in range(6):
        add(session, f"{number}", 20, [1])
    assert found(session).largest == ()
