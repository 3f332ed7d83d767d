# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from analysis import open_session, summarize
from analysis.pool import usage
from analysis.prefix import prompts, reuse, sharing, stretches
from analysis.prefix.sharing import Sharing, Stretch
from tests.analysis.builder import SessionBuilder
from tests.analysis.stories import request, swept


def sharing_of(session: SessionBuilder, after_sec: float = 0.0) -> Sharing:
    return summarize(open_session(session.folder, after_sec=after_sec)).sharing


def test_the_hottest_prefix_and_what_it_saved(session: SessionBuilder) -> None:
    """Contents 1, 2 and 3 are shared by four requests: 48 + 16 + 48 tokens were found."""
    swept(session)
    sharing = sharing_of(session)
    assert (sharing.requests, sharing.sharing) == (5, 4)
    # 1 2 3 4 9 and 11 to 14.
    assert (sharing.contents, sharing.shared_contents) == (9, 3)
    assert sharing.pieces == (Stretch(3, 0, 0, 48, 3, 4, 3, 112),)


def test_where_prompts_part_a_new_stretch_begins(session: SessionBuilder) -> None:
    """All have content 1, two have 2 and 3 after it, two others 5."""
    prompts = {"a": [1, 2, 3], "b": [1, 2, 3], "c": [1, 5], "d": [1, 5]}
    hits = {"a": 0, "b": 48, "c": 16, "d": 32}
    for number, (name, contents) in enumerate(prompts.items()):
        tokens = 16 * len(contents) + 1
        lookup, row = request(name, number, number + 0.5, tokens, contents, hits[name])
        session.lookups(lookup)
        session.requests(row)
    assert sharing_of(session).pieces == (
        Stretch(1, 0, 0, 16, 1, 4, 3, 48),
        Stretch(3, 0, 16, 48, 2, 2, 1, 32),
        Stretch(5, 0, 16, 32, 1, 2, 1, 16),
    )


def test_the_gap_between_two_uses(session: SessionBuilder) -> None:
    """Three blocks after 1.5 s, three after 2.5 s (two of them missed), three after 3 s."""
    swept(session)
    sharing = sharing_of(session)
    assert (sharing.gap.count, sharing.gap.p50_sec, sharing.gap.max_sec) == (9, 2.5, 3)
    assert sharing.gap.mean_sec == pytest.approx(7 / 3)
    assert (sharing.found_gap.count, sharing.missed_gap.count) == (7, 2)
    assert sharing.missed_gap.max_sec == 2.5


def test_the_working_set_over_time(session: SessionBuilder) -> None:
    """Of the last second, 1 2 3 count from 1 to 3.75 (A2 ended at 2.75), from 5 to 7 and from 8
    on; S's four from 3 to 5, B's own from 5 to 7, C's own from 8 on. So there are 3 from second
    1, 7 from second 3, 4 from 3.75 to 7, none to 8, and 4 to the end."""
    swept(session)
    second, whole = sharing_of(session).working_sets
    assert (second.window_sec, second.peak_blocks, second.peak_sec) == (1, 7, 3)
    assert second.mean_blocks == pytest.approx((2 * 3 + 0.75 * 7 + 3.25 * 4 + 2 * 4) / 10)
    assert second.pool_blocks == 100
    # Nothing is forgotten: 3 from second 1, 7 from 3, 8 from 5, 9 from 8.
    assert (whole.window_sec, whole.peak_blocks, whole.peak_sec) == (None, 9, 8)
    assert whole.mean_blocks == pytest.approx((2 * 3 + 2 * 7 + 3 * 8 + 2 * 9) / 10)


def test_the_working_set_of_a_round(session: SessionBuilder) -> None:
    """What was found came back after 2.5 s: 1 2 3 are never out of use for longer, S's four count
    from 3 to 6.5, B's own from 5 to 8.5: 8 in second 5."""
    swept(session)
    (found,) = sharing_of(session).found_rounds
    assert (found.window_sec, found.peak_blocks, found.peak_sec) == (2.5, 8, 5)
    (missed,) = sharing_of(session).missed_rounds
    assert missed.window_sec == 2.5


def test_what_a_running_request_holds_is_in_use(session: SessionBuilder) -> None:
    """a runs from 1 to 6, b from 2 to 3 and c from 6.5 to 6.75, all with content 1: it counts from
    1 to 7.75, once."""
    for name, began, ended in (("a", 1, 6), ("b", 2, 3), ("c", 6.5, 6.75)):
        lookup, row = request(name, began, ended, 17, [1], 0 if name == "a" else 16)
        session.lookups(lookup)
        session.requests(row)
    second, _ = sharing_of(session).working_sets
    assert (second.peak_blocks, second.peak_sec) == (1, 1)
    assert second.mean_blocks == pytest.approx(6.75 / 10)


def test_the_block_that_ends_a_prompt_cannot_be_used_again(session: SessionBuilder) -> None:
    """Of two blocks in prompts of 32 tokens the second one has the last token."""
    for number in (1, 2):
        lookup, row = request(f"r{number}", number, number + 0.5, 32, [1, 2], 16 * (number - 1))
        row["hash_ids"] = [1, 2]
        session.lookups(lookup)
        session.requests(row)
    sharing = sharing_of(session)
    assert (sharing.shared_contents, sharing.gap.count) == (2, 1)


def test_warm_up_is_left_out_and_what_was_used_in_it_is_known(session: SessionBuilder) -> None:
    """From second 4.5 on: B and C count, and B's gap is that to A2."""
    swept(session)
    sharing = sharing_of(session, after_sec=4.5)
    assert sharing.requests == 2
    assert (sharing.gap.count, sharing.gap.max_sec) == (6, 3)
    second, _ = sharing.working_sets
    # S's four until 5, then 4 to 7, none to 8, 4 to 10: over 5.5 s.
    assert second.mean_blocks == pytest.approx((0.5 * 4 + 2 * 4 + 2 * 4) / 5.5)


def test_two_engines_share_nothing(session: SessionBuilder) -> None:
    """The same prompt on each: each has its own cache, pool and working set."""
    for engine in (0, 1):
        lookup, row = request(f"r{engine}", 1, 2, 50, [1, 2, 3], 0)
        session.lookups({**lookup, "engine": engine})
        session.requests({**row, "engine": engine})
    session.usage((0, 0), engine=1)
    sharing = sharing_of(session)
    assert (sharing.requests, sharing.sharing, sharing.shared_contents) == (2, 0, 0)
    assert sharing.contents == 6
    assert [
        (known.engine, known.window_sec, known.peak_blocks, known.pool_blocks)
        for known in sharing.working_sets
    ] == [(0, 1, 3, None), (0, None, 3, None), (1, 1, 3, 100), (1, None, 3, 100)]


def test_nothing_shared_is_no_round(session: SessionBuilder) -> None:
    lookup, row = request("alone", 1, 2, 50, [1, 2, 3], 0)
    session.lookups(lookup)
    session.requests(row)
    sharing = sharing_of(session)
    assert (sharing.sharing, sharing.pieces, sharing.gap.count) == (0, (), 0)
    assert (sharing.found_rounds, sharing.missed_rounds) == ((), ())
    assert sharing.working_sets[0].pool_blocks is None


@pytest.mark.parametrize("after_sec", [0, 5.5])
def test_the_curve_is_the_mean_working_set_of_each_window(
    session: SessionBuilder, after_sec: float
) -> None:
    """Two ways to compute it: the time that each use adds, and the level of a counter."""
    swept(session)
    opened = open_session(session.folder, after_sec=after_sec)
    asked = prompts.read(opened)
    uses = reuse.uses(asked.without_contents(), stretches.in_common(asked))
    used = sharing._Used(opened, asked.without_contents(), uses, usage.measure(opened))
    curve = list(used.curve())
    assert len(curve) == sharing.POINTS
    assert curve[0].window_sec == 0.01
    assert curve[-1].window_sec == pytest.approx(10 - after_sec)
    levels = [next(iter(used.working_sets([level.window_sec]))).mean_blocks for level in curve]
    assert [level.mean_blocks for level in curve] == pytest.approx(levels)
    assert levels == sorted(levels)
    assert levels[-1] > levels[0] > 0
