# SPDX-License-Identifier: Apache-2.0
"""What is wrong is on the first screen, ranked, and what is fine takes a line."""

from __future__ import annotations

from pathlib import Path

import analysis
from analysis.renderers.text import screen
from analysis.summary import Summary
from analysis.wording import sections
from tests.situations.bench import Bench, Tables
from tests.situations.test_lost_to_resets import in_rounds
from tests.support.scheduler import tokens

ALL_IS_WELL = "Nothing in this session asks for another setting."


def summarized(tables: Tables) -> Summary:
    return analysis.summarize(analysis.open_session(tables.folder))


def top(summary: Summary) -> str:
    """The first twenty lines, as one."""
    return " ".join(" ".join(screen.render(summary).splitlines()[:20]).split())


def test_a_hundred_blocks_that_nobody_holds(bench: Bench) -> None:
    engine = bench.engine(400)
    engine.run(bench.request("a", tokens(1, 65), 2))
    engine.pool.get_new_blocks(100)
    engine.run(bench.request("b", tokens(2, 65), 2))
    found = summarized(engine.end())

    (finding,) = (each for each in found.findings if each.section == sections.HOLDERS)
    assert finding.share == 100 / 400
    # A token of this model takes 64 bytes.
    assert finding.bytes == 100 * 16 * 64
    assert found.findings[0] == finding
    assert "100 blocks" in top(found)
    assert "[Who holds blocks]" in top(found)
    assert ALL_IS_WELL not in screen.render(found)


def test_resets_are_found_and_evictions_are_fine(bench: Bench) -> None:
    found = summarized(in_rounds(bench))
    said = top(found)
    assert "19,200 prompt tokens (74.77 %) were computed again" in said
    assert "dropped by resets of the prefix cache [Why the prefix cache missed]" in said
    assert "Fine: leaks, evictions, " in said
    assert "No setting is known to mend what was found." in screen.render(found)


def test_requests_that_take_turns_evict_each_other(bench: Bench) -> None:
    """Four prompts of 4 full blocks and one token take turns in 12 blocks: each needs five, and
    loses its own before it comes again. Between two uses all 16 full blocks are used."""
    engine = bench.engine(12)
    for number in range(12):
        engine.run(bench.request(f"r{number}", tokens(number % 4, 65), 1))
    found = summarized(engine.end())
    (finding,) = (each for each in found.findings if each.section == sections.MISSES)
    assert finding.tokens == found.misses.recomputed_tokens > 0
    assert "take turns and evict each other" in top(found)


def test_the_first_in_line_blocks_what_would_fit(bench: Bench) -> None:
    """a holds 5 to 7 of 20 blocks for 40 steps. The head needs 17, b behind it one."""
    engine = bench.engine(20)
    engine.add(bench.request("a", tokens(1, 64), 40))
    engine.step()
    engine.run(bench.request("head", tokens(2, 16 * 17), 1), bench.request("b", tokens(3, 8), 1))
    said = top(summarized(engine.end()))
    assert "head-of-line blocking" in said.lower()
    assert "[Why requests waited]" in said


def test_a_session_that_is_fine(bench: Bench, tmp_path: Path) -> None:
    engine = bench.engine(20)
    engine.run(bench.request("a", tokens(1, 65), 2))
    engine.run(bench.request("b", tokens(1, 65), 2))
    found = summarized(engine.end())
    known = [each for each in found.findings if each.section != sections.USAGE]
    assert known == []
    assert "Fine: leaks, evictions, preemptions, waiting" in top(found)
