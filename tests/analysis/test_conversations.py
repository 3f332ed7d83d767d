# SPDX-License-Identifier: Apache-2.0
"""What was found in the same conversation, and what across conversations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from analysis import open_session, summarize
from analysis.prefix.conversations import Conversations
from analysis.renderers.text import summary as text
from analysis.whatif import ceiling, references
from analysis.whatif.workload import of_session
from tests.analysis.builder import SessionBuilder
from tests.analysis.stories import request
from tests.support.scheduler import RequestMaker, trace_requests
from tests.whatif import truth

BLOCK = 16


@dataclass(frozen=True)
class Turn:
    """A request with these contents, the last block of its prompt not full, and the blocks that it
    found."""

    contents: tuple[int, ...]
    found: int = 0


def found(session: SessionBuilder, *turns: Turn, after_sec: float = 0) -> Conversations:
    for number, turn in enumerate(turns, 1):
        tokens = BLOCK * len(turn.contents) + 2
        lookup, row = request(
            f"r{number}", number, number + 0.5, tokens, list(turn.contents), BLOCK * turn.found
        )
        session.lookups(lookup)
        session.requests(row)
    return summarize(open_session(session.folder, after_sec=after_sec)).conversations


def test_a_turn_finds_the_turn_before(session: SessionBuilder) -> None:
    talk = found(session, Turn((1, 2)), Turn((1, 2, 3), 2), Turn((1, 2, 3, 4), 3))
    assert (talk.requests, talk.conversations, talk.turns) == (3, 1, 2)
    assert (talk.hit_tokens, talk.within_tokens, talk.across_tokens) == (80, 80, 0)


def test_a_system_prompt_is_shared_across_conversations(session: SessionBuilder) -> None:
    """Both begin with block 1. The second one's next turn finds that of the first conversation, and
    two blocks of its own."""
    talk = found(session, Turn((1, 2)), Turn((1, 7, 6), 1), Turn((1, 7, 6, 8), 3))
    assert (talk.conversations, talk.turns) == (2, 1)
    assert (talk.within_tokens, talk.across_tokens, talk.unknown_tokens) == (32, 32, 0)


def test_a_longer_prompt_that_only_shares_a_beginning_is_no_turn(session: SessionBuilder) -> None:
    talk = found(session, Turn((1, 2)), Turn((1, 7, 8), 1))
    assert (talk.conversations, talk.turns) == (2, 0)
    assert (talk.within_tokens, talk.across_tokens) == (0, 16)


def test_the_same_prompt_again_begins_a_conversation(session: SessionBuilder) -> None:
    talk = found(session, Turn((1, 2)), Turn((1, 2), 2))
    assert (talk.conversations, talk.turns) == (2, 0)
    assert (talk.within_tokens, talk.across_tokens) == (0, 32)


def test_what_was_not_found_does_not_count(session: SessionBuilder) -> None:
    talk = found(session, Turn((1, 2, 3)), Turn((1, 2, 3, 4), 1))
    assert (talk.turns, talk.hit_tokens, talk.within_tokens) == (1, 16, 16)


def test_a_conversation_may_have_begun_in_the_warm_up(session: SessionBuilder) -> None:
    talk = found(session, Turn((1, 2)), Turn((1, 2, 3), 2), after_sec=1.75)
    assert (talk.requests, talk.conversations, talk.turns) == (1, 1, 1)
    assert (talk.hit_tokens, talk.within_tokens) == (32, 32)


def test_whose_content_it_was_may_not_be_known(session: SessionBuilder) -> None:
    """The request that computed block 1 has not ended: it has no row."""
    talk = found(session, Turn((1, 2), 1))
    assert (talk.hit_tokens, talk.within_tokens, talk.across_tokens) == (16, 0, 0)
    assert talk.unknown_tokens == 16


def test_in_words(session: SessionBuilder) -> None:
    found(session, Turn((1, 2)), Turn((1, 7), 1), Turn((1, 7, 8), 2))
    said = " ".join(text.render(summarize(open_session(session.folder))).split())
    assert (
        "Going on 33.33 % of it was found in the same conversation; 1 of 3 requests continue one "
        "Shared 66.67 % of it was found across conversations" in said
    )


@pytest.mark.usefixtures("hooks_on")
def test_a_pool_without_evictions_finds_what_the_ceiling_says(model: Path, tmp_path: Path) -> None:
    """The trace's head, one request at a time through vLLM's scheduler, in a pool that keeps all:
    the same conversations, and the same tokens of each kind, as the ceiling of ``whatif``."""
    requests = trace_requests(RequestMaker(16), 400, max_model_len=1_200)
    apart = [(60_000.0 * number, asked) for number, (_, asked) in enumerate(requests)]
    run = truth.run(model, tmp_path / "s", 20_000, requests=apart, max_model_len=2_048)
    session = open_session(run.session)
    talk = summarize(session).conversations
    most = ceiling.measure([references.of_workload(of_session(session))])
    assert run.evictions == 0
    assert talk.turns > 10
    assert talk.conversations == most.conversations
    assert talk.within_tokens == most.within_tokens > 0
    assert talk.across_tokens == most.across_tokens > 0
    assert talk.unknown_tokens == 0
