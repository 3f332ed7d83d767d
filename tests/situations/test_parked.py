# SPDX-License-Identifier: Apache-2.0
"""Preempting that frees nothing at once (situation 20): blocks that a step in flight may still
write to are parked. vLLM does so with a KV connector; here it is switched on by hand."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import pytest

from tests.situations.bench import Bench, Engine
from tests.situations.test_evicted import explained
from tests.support.scheduler import answer, tokens


class InFlight:
    """An engine that schedules steps, 9 ms after what came before, while so many others are still
    in flight; results come 1 ms after the next step was scheduled."""

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine, self._count = engine, count
        self._flight: deque[tuple[Any, Any]] = deque()
        engine.scheduler.defer_block_free = True

    def step(self) -> None:
        output = self._engine.schedule(0.009)
        self._flight.append((output, answer(self._engine.scheduler, output)))
        if len(self._flight) > self._count:
            self.result()

    def result(self) -> None:
        self._engine.wait(0.001)
        self._engine.update(*self._flight.popleft())

    def run(self) -> None:
        while self._engine.scheduler.has_unfinished_requests():
            self.step()
        while self._flight:
            self.result()


def with_connector(engine: Engine) -> None:
    """What the session of an engine with a KV connector says."""
    path = engine.end().folder / "metadata.json"
    metadata = json.loads(path.read_text())
    metadata["scheduler"]["connector"] = "ExampleConnector"
    path.write_text(json.dumps(metadata))


def test_a_preemption_is_put_off(bench: Bench) -> None:
    """Ten usable blocks, five each. In step 18 a needs a sixth, but b's are in flight: nobody is
    preempted and nothing scheduled, until step 19, 10 ms later, preempts b."""
    engine = bench.engine(10, async_scheduling=True)
    engine.add(bench.request("a", tokens(1, 64), 49), bench.request("b", tokens(2, 64), 20))
    InFlight(engine, 1).run()
    with_connector(engine)
    summary, said = explained(engine)
    found = summary.preemptions
    assert (found.count, found.parked.preemptions, found.parked.blocks) == (1, 0, 0)
    assert found.parked.put_off_steps == 1
    assert found.parked.put_off_sec == pytest.approx(0.01)
    assert found.costliest[0].preempted_sec == 0.188
    assert found.costliest[0].made_room_for == "a"
    assert "Put off 1 step (10.0 ms) found no free block, and no request to" in said


def test_parked_blocks_come_free_steps_later(bench: Bench) -> None:
    """Ten usable blocks, five each. Steps 2 and 3 are in flight when both are preempted to drop the
    cache, which is refused as all blocks are parked. Step 4, in second 0.037, records it and finds
    no room; the blocks come free with the results of step 3, 1 ms after step 5, which was scheduled
    10 ms later."""
    engine = bench.engine(10, async_scheduling=True)
    engine.add(bench.request("a", tokens(1, 72), 6), bench.request("b", tokens(2, 72), 6))
    flight = InFlight(engine, 2)
    for _ in range(3):
        flight.step()
    with pytest.raises(RuntimeError):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    flight.run()
    summary, said = explained(engine)
    found = summary.preemptions
    assert (found.count, found.parked.preemptions, found.parked.blocks) == (2, 2, 10)
    assert found.parked.most_steps == 1
    assert found.parked.longest_sec == pytest.approx(0.011)
    assert [one.preempted_sec for one in found.costliest] == pytest.approx([0.037, 0.037])
    assert [one.made_room_for for one in found.costliest] == [None, None]
    assert found.parked.put_off_steps == 0
    assert "Parked 10 blocks of 2 preemptions came free only later, up to 1 step or 11.0 ms" in said
