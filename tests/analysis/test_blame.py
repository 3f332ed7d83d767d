# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from analysis import Summary, open_session, summarize
from analysis.prefix.blame import Content
from analysis.renderers.text import summary as text
from tests.analysis.builder import SessionBuilder
from tests.analysis.stories import request, swept


def summary_of(session: SessionBuilder) -> Summary:
    return summarize(open_session(session.folder))


def test_the_evictor_is_named_with_what_others_paid(session: SessionBuilder) -> None:
    swept(session)
    blame = summary_of(session).blame
    assert (blame.recomputed_tokens, blame.evictors) == (32, 1)
    (worst,) = blame.worst
    assert (worst.request_id, worst.recomputed_tokens, worst.requests) == ("S", 32, 1)
    assert worst.after_p50_sec == pytest.approx(1.999)
    assert (worst.regretted_blocks, worst.evicted_blocks, worst.input_tokens) == (2, 3, 65)


def test_a_one_off_prompt_that_sweeps_is_scan_pollution(session: SessionBuilder) -> None:
    """Nobody asked for what S computed, and both blocks had been used by A and A2 before."""
    swept(session)
    blame = summary_of(session).blame
    assert blame.worst[0].one_off is True
    swept_by = blame.sweepers
    assert (swept_by.requests, swept_by.evicted_blocks, swept_by.evicted_tokens) == (1, 3, 48)
    assert (swept_by.regretted_blocks, swept_by.recomputed_tokens) == (2, 32)
    assert (swept_by.share, swept_by.proven_blocks) == (1.0, 2)


def test_a_prompt_that_is_asked_for_again_is_none(session: SessionBuilder) -> None:
    """D asks for two of the blocks that S computed, though it does not find the first."""
    swept(session)
    lookup, row = request("D", 9.25, 9.5, 40, [11, 12], 0)
    session.lookups(lookup)
    session.requests(row)
    blame = summary_of(session).blame
    assert blame.worst[0].one_off is False
    assert (blame.sweepers.requests, blame.sweepers.share) == (0, 0)
    # 11 was evicted by B, and D computed it again; 12 is still there.
    assert [(worst.request_id, worst.recomputed_tokens) for worst in blame.worst] == [
        ("S", 32),
        ("B", 16),
    ]
    assert blame.recomputed_tokens == 48


def test_contents_that_the_same_lookups_missed_are_one_stretch(session: SessionBuilder) -> None:
    swept(session)
    (content,) = summary_of(session).blame.contents
    assert content == Content(
        content_id=3,
        engine=0,
        begin_token=16,
        end_token=48,
        blocks=2,
        evictions=2,
        misses=1,
        recomputed_tokens=32,
    )


def test_an_evictor_that_has_not_ended_is_not_judged(session: SessionBuilder) -> None:
    swept(session)
    path = session.folder / "requests.jsonl"
    kept = [line for line in path.read_text().splitlines() if '"S"' not in line]
    path.write_text("\n".join(kept) + "\n")
    blame = summary_of(session).blame
    (worst,) = blame.worst
    assert (worst.request_id, worst.input_tokens, worst.one_off) == ("S", None, None)
    assert blame.sweepers.requests == 0


@pytest.mark.parametrize("reason", ["reset", "explicit"])
def test_what_was_lost_on_purpose_has_no_evictor(session: SessionBuilder, reason: str) -> None:
    swept(session)
    path = session.folder / "kv_cache_evictions.csv"
    text_of = path.read_text().replace("reallocated", reason).replace(",S,", ",,")
    path.write_text(text_of)
    summary = summary_of(session)
    assert (summary.blame.evictors, summary.blame.worst) == (0, ())
    (lost,) = summary.evictions.on_purpose.items()
    assert (lost[0], lost[1].blocks, lost[1].recomputed_tokens) == (reason, 2, 32)


def test_it_is_said_in_words(session: SessionBuilder) -> None:
    swept(session)
    rendered = " ".join(text.render(summary_of(session)).split())
    for said in (
        "Recomputed 32 tokens evicted for 1 request",
        "S 3 2 32 1 2.00 s",
        "One-off prompts 1 evicted 3 blocks (48 tokens)",
        "2 of the evicted ones were asked for again: 100.00 % of the recomputed tokens",
        "2 of these had been used by two requests or more before",
        "Tokens 16 to 48 of 1 prompt (content 3) were evicted and computed again: 32 tokens",
        "Regretted 2 (40.00 %) asked for again by 1 request",
        "Back too late 33.33 % of 9 blocks asked for again",
    ):
        assert said in rendered
