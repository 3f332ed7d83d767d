# SPDX-License-Identifier: Apache-2.0
"""Blocks that are used and slots that are filled: situation 22."""

from __future__ import annotations

import analysis
from analysis.pool import fragmentation, usage
from analysis.pool.fragmentation import Fragmentation
from analysis.tables import facts
from tests.situations.bench import Bench, Tables
from tests.support.scheduler import tokens


def fragmentation_of(tables: Tables) -> Fragmentation:
    session = analysis.open_session(tables.folder)
    found = fragmentation.measure(session, facts.read(session), usage.measure(session))
    assert found is not None
    return found


def test_two_thirds_of_the_blocks_are_used_and_a_third_of_the_slots(bench: Bench) -> None:
    """Eight requests of a block each: 8 of 12 blocks, 66.67 %. Six of 9 tokens and two of 8 are
    70 of the pool's 12 x 16 = 192 slots, 36.46 %; of the 128 slots in held blocks 58 are empty.

    In blocks of 8 the six need 16 slots each and the two 8: 112 slots, 42 of them empty.
    """
    engine = bench.engine(12)
    lengths = [9] * 6 + [8] * 2
    engine.add(*(bench.request(f"r{n}", tokens(n, length), 1) for n, length in enumerate(lengths)))
    output = engine.schedule()
    engine.wait(0.5)
    engine.update(output)
    tables = engine.end()

    assert tables.usage()[0] == (66.67, 8, 0, 4, 8, 0)
    found = fragmentation_of(tables)
    assert (found.requests, found.slots, found.empty_slots) == (8, 128, 58)
    assert found.actual.at_end == found.actual.over_time == 58 / 128
    assert found.filled_at_peak_pct is not None
    assert round(found.filled_at_peak_pct, 2) == round(66.67 * 70 / 128, 2) == 36.46
    shares = {empty.block_size: empty.at_end for empty in found.by_block_size}
    assert shares == {
        8: 1 - 70 / 112,
        16: 1 - 70 / 128,
        32: 1 - 70 / 256,
        64: 1 - 70 / 512,
        128: 1 - 70 / 1024,
    }


def test_a_growing_answer_fills_its_last_block(bench: Bench) -> None:
    """A prompt of 30 tokens and an answer of 5: in the steps that compute tokens 31 to 34 there
    are 32, 32, 48 and 48 slots, 130 tokens of 160; the step before held 30 tokens in 32 for 10 ms
    of which the first token took 1, and each later step took 10."""
    engine = bench.engine(12)
    engine.add(bench.request("r", tokens(1, 30), 5))
    for _ in range(5):
        output = engine.schedule(0.009)
        engine.wait(0.001)
        engine.update(output)
    tables = engine.end()

    found = fragmentation_of(tables)
    # 34 tokens in three blocks at the end.
    assert (found.slots, found.empty_slots) == (48, 14)
    held, filled = 0.001 * 32 + 0.04 * 160 / 4, 0.001 * 30 + 0.04 * 130 / 4
    assert found.actual.over_time is not None
    assert round(found.actual.over_time, 9) == round(1 - filled / held, 9)


def test_slots_for_drafts_are_empty_slots(bench: Bench, model: object) -> None:
    """30 tokens of prompt and three of lookahead take three blocks at once: 48 slots."""
    engine = bench.engine(
        20,
        speculative_config={
            "method": "draft_model",
            "model": str(model),
            "num_speculative_tokens": 3,
        },
    )
    engine.run(bench.request("r", tokens(1, 30), 1))
    found = fragmentation_of(engine.end())
    assert (found.slots, found.empty_slots) == (48, 18)
    assert {empty.block_size: empty.at_end for empty in found.by_block_size}[16] == 1 - 30 / 32
