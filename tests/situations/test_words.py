# SPDX-License-Identifier: Apache-2.0
"""What the analyzer says of usage and capacity, to somebody who asks (situations 12, 15 to 18 and
22 to 25)."""

from __future__ import annotations

from pathlib import Path

import analysis
from analysis.renderers.text import summary as text
from tests.situations.bench import Bench, Engine
from tests.support.scheduler import tokens


def words(folder: Path) -> str:
    """The summary as text, without its line breaks and columns."""
    session = analysis.open_session(folder, complete=False)
    return " ".join(text.render(analysis.summarize(session)).split())


def steps(engine: Engine, count: int = 1) -> None:
    """Steps of 10 ms whose results come 1 ms after they were scheduled."""
    for _ in range(count):
        output = engine.schedule(0.009)
        engine.wait(0.001)
        engine.update(output)


def test_usage_is_zero_and_the_cache_is_full(bench: Bench) -> None:
    engine = bench.engine(64)
    for number in range(5):
        engine.run(bench.request(f"r{number}", tokens(number, 256), 1), seconds=1)
    said = words(engine.end().folder)
    assert "At the end 0.00 % 0 held, 64 cached, 0 free of 64" in said
    assert "Who holds blocks" not in said
    assert "Why requests waited" not in said


def test_requests_wait_at_a_third_of_usage(bench: Bench) -> None:
    """Four wait for 10 ms and two for another 10 ms, with 136 of 200 blocks not held."""
    engine = bench.engine(200, max_num_batched_tokens=1024)
    engine.add(*(bench.request(f"r{number}", tokens(number, 512), 1) for number in range(6)))
    steps(engine, 3)
    said = words(engine.end().folder)
    assert "Waited 60.0 ms of all requests together up to 4 at once, during 20.0 ms" in said
    assert "No tokens left in the step (1,024) 60.0 ms 100.00 % 68.00 %" in said


def test_a_request_that_needs_every_block(bench: Bench) -> None:
    """It and the one behind it wait for 100 steps."""
    engine = bench.engine(63)
    engine.add(bench.request("huge", tokens(1, 1010), 1), bench.request("small", tokens(2, 16), 1))
    steps(engine, 100)
    engine.abort("huge")
    steps(engine)
    said = words(engine.end().folder)
    assert "huge needs 64 blocks for 1,010 tokens, 63 are usable" in said
    assert "First in line can never run 2.00 s 100.00 % 100.00 %" in said


def test_a_request_that_preempts_itself(bench: Bench) -> None:
    engine = bench.engine(
        63,
        max_num_batched_tokens=512,
        scheduler_reserve_full_isl=False,
        enable_prefix_caching=False,
    )
    engine.add(bench.request("huge", tokens(1, 1010), 1))
    engine.step(100)
    engine.abort("huge")
    said = words(engine.end().folder)
    alone = "huge has no room for its next chunk even alone: it can never run"
    assert f"Preempts itself 50 times {alone}" in said


def test_slots_of_used_blocks_are_half_empty(bench: Bench) -> None:
    """Situation 22 (test_fragmentation has the numbers)."""
    engine = bench.engine(12)
    lengths = [9] * 6 + [8] * 2
    engine.add(*(bench.request(f"r{n}", tokens(n, length), 1) for n, length in enumerate(lengths)))
    steps(engine)
    said = words(engine.end().folder)
    assert "Peak 66.67 %" in said
    empty = "Empty slots 45.31 % of the slots in held blocks hold no token"
    assert f"{empty}, so at the peak 36.46 % of all slots were filled" in said
    assert "37.50 % at 8, 45.31 % at 16, 72.66 % at 32, 86.33 % at 64, 93.16 % at 128" in said


def test_a_leak_and_endless_answers(bench: Bench, tmp_path: Path) -> None:
    """Four pinned blocks of a request that was aborted an hour ago, while nothing runs; then a
    second one that has no end holds two of its own."""
    engine = bench.engine(20)
    engine.add(bench.request("gone", tokens(1, 64), 100))
    engine.step()
    (blocks,) = engine.scheduler.kv_cache_manager.get_blocks("gone").blocks
    engine.pool.touch(blocks)
    engine.abort("gone")
    engine.wait(3600)
    engine.run(bench.request("later", tokens(2, 16), 1))
    engine.wait(60)
    # An abort of a request that never ran: the last thing that happens.
    engine.add(bench.request("never", tokens(3, 16), 1))
    engine.abort("never")
    said = words(engine.tables_if_killed(tmp_path / "leaking").folder)
    assert (
        "Leaked 4 blocks no running or waiting request holds them; there had been none for" in said
    )
    assert "gone ended 1 h 01 min 00 s before, and 4 blocks that it got have not been freed" in said
    assert "The oldest" not in said

    engine.add(bench.request("endless", tokens(4, 17), 1000))
    steps(engine, 3)
    said = words(engine.tables_if_killed(tmp_path / "answering").folder)
    assert "Held at the end 6 blocks by 1 request that had not ended" in said
    assert "endless 2 20.0 ms" in said
    assert "Leaked 4 blocks no running or waiting request holds them gone ended" in said


def test_work_for_an_aborted_request(bench: Bench) -> None:
    """64 of its 136 tokens were computed."""
    engine = bench.engine(20, max_num_batched_tokens=64)
    engine.add(bench.request("gone", tokens(1, 136), 5))
    engine.step()
    engine.abort("gone")
    assert "Aborted 1 64 tokens had been computed for them" in words(engine.end().folder)


def test_resets_done_and_refused(bench: Bench) -> None:
    """The first is refused, as a request runs; the second finds the engine idle."""
    engine = bench.engine(20)
    engine.add(bench.request("r", tokens(1, 64), 3))
    engine.step()
    engine.scheduler.reset_prefix_cache()
    engine.run()
    engine.scheduler.reset_prefix_cache()
    assert "Cache resets 1 done, 1 refused" in words(engine.end().folder)


def test_requests_that_may_not_read_the_cache_are_no_misses(bench: Bench) -> None:
    """Situation 12: the second asks for the prompt's log probabilities, so it reads nothing."""
    engine = bench.engine(20)
    engine.run(bench.request("first", tokens(1, 64), 1))
    engine.run(bench.request("scored", tokens(1, 64), 1, prompt_logprobs=1))
    said = words(engine.end().folder)
    assert "Skip the cache 1 lookups, in neither rate" in said
    assert "0.00 % of tokens 0 of 64 came from the cache" in said
