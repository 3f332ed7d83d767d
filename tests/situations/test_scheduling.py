# SPDX-License-Identifier: Apache-2.0
"""What the scheduler did, in the analyzer's figures, against what it was seen to do."""

from __future__ import annotations

from analysis import open_session
from analysis.pool import pressure
from analysis.requests import scheduling
from analysis.requests.scheduling import Pressure
from tests.situations.bench import Bench
from tests.support.scheduler import tokens


def test_steps_waits_and_pressure(bench: Bench) -> None:
    """Ten usable blocks; a step every 10 ms, results 1 ms later.

    a (144 tokens, nine blocks, three tokens of output) arrives at 0 and b (16 tokens, one token)
    at 2 ms, while nothing is held: both run in step 1, and b ends with it. From step 2 on a has
    b's block, too. c (16 tokens, two tokens) arrives at 15 ms, while nine blocks are held, and
    waits for a, which ends at 30 ms, so it runs in steps 4 (39 ms) and 5.
    """
    engine = bench.engine(10)
    engine.add(bench.request("a", tokens(1, 144), 3))
    engine.wait(0.002)
    engine.add(bench.request("b", tokens(2, 16), 1))
    for number in range(5):
        if number == 1:
            engine.wait(0.005)
            engine.add(bench.request("c", tokens(3, 16), 2))
        output = engine.schedule((0.007, 0.004, 0.009, 0.009, 0.009)[number])
        engine.wait(0.001)
        engine.update(output)
    tables = engine.end()

    # Per cent held after schedule() and after the update.
    assert [row[0] for row in tables.usage()] == [100.0, 90.0, 100.0, 0.0, 10.0, 20.0, 0.0]
    session = open_session(tables.folder)
    found = scheduling.measure(session, pressure.states(session))
    assert (found.steps, found.idle_steps) == (5, 0)
    assert (found.prefill_steps, found.mixed_steps, found.decode_steps) == (2, 0, 3)
    assert found.requests is not None
    assert (found.requests.mean, found.requests.p50, found.requests.max) == (6 / 5, 1, 2)
    assert found.tokens is not None
    assert (found.tokens.p50, found.tokens.p95, found.tokens.max) == (1, 160, 160)
    assert found.tokens.mean == (160 + 1 + 1 + 16 + 1) / 5
    assert (found.queued.count, round(found.queued.max_sec or 0, 6)) == (3, 0.024)
    assert [round(spread.p50_sec or 0, 6) for spread in (found.queued, found.first_token)] == [
        0.009,
        0.01,
    ]
    low, high = found.by_pressure[0], found.by_pressure[-1]
    # Steps 4 and 5 left one and two blocks held; a and b arrived at an empty pool.
    assert (low.band, low.steps, low.mean_tokens, low.arrived) == ("under_40", 2, 8.5, 2)
    # 90 % is not over 90 %.
    assert [part.band for part in found.by_pressure] == ["under_40", "from_80_to_90", "over_90"]
    assert high == Pressure("over_90", 3, 4 / 3, 54.0, 0, 0, None, None, None, None)
