# SPDX-License-Identifier: Apache-2.0
"""Which number is advised, whatever a replay says of each?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from analysis.judgement.advice.candidate import Aim, Candidate
from analysis.judgement.advice.replay import NoReplay, confirmed
from analysis.summary import Advice, Known
from analysis.whatif.outcome import Outcome

BEFORE = Outcome(
    engine="exact",
    label="as recorded",
    num_blocks=100,
    block_size=16,
    policy="lru",
    requests=10,
    query_tokens=1_000,
    hit_tokens=100,
    evictions=50,
    preemptions=8,
    recomputed_tokens=300,
    steps=100,
    queue_mean_sec=4.0,
    span_sec=1.0,
)


class Replay:
    """Gives the outcome that a function says, and runs out of time after some rounds."""

    def __init__(
        self,
        outcome: Callable[[int], Outcome | None],
        *,
        most: int = 10_000,
        rounds: int = 100,
        before: Outcome = BEFORE,
        known: Known = "replayed",
    ) -> None:
        self.known: Known = known
        self.values: list[int] = []
        self._outcome, self._most, self._rounds, self._before = outcome, most, rounds, before

    def recorded(self, setting: str, value: int) -> Outcome:
        return self._before

    def most(self, setting: str) -> int:
        return self._most

    def at_once(self) -> int:
        return 2

    def tried(self, setting: str, values: Sequence[int]) -> Sequence[Outcome | None]:
        self._rounds -= 1
        if self._rounds < 0:
            raise NoReplay("Time is over.")
        self.values += values
        return [self._outcome(value) for value in values]


def written(value: int | None) -> Advice:
    given = None if value is None else f"{value}"
    return Advice("pool", f"Take {given}.", "--blocks", given, (), "", "low")


def candidate(**changes: Any) -> Candidate:
    aims = (Aim("preemptions", 8),)
    found = Candidate("num_blocks", 110, aims, written, "high", without=True)
    return replace(found, **changes)


def preempts_below(border: int) -> Callable[[int], Outcome]:
    return lambda value: replace(BEFORE, preemptions=5 * (value < border))


def value(advice: Advice | None) -> str | None:
    assert advice is not None
    return advice.value


@pytest.mark.parametrize("border", [90, 110])
def test_a_number_that_is_confirmed_stays(border: int) -> None:
    replay = Replay(preempts_below(border))
    advice = confirmed(candidate(), replay, None)
    assert value(advice) == "110"
    assert replay.values == [110]
    assert advice is not None
    assert (advice.known, advice.confidence) == ("replayed", "high")


def test_a_queue_is_an_effect_only_where_it_was_held_against_the_session() -> None:
    found = confirmed(candidate(), Replay(preempts_below(110)), None)
    assert found is not None
    assert "queue_mean_sec" not in {effect.figure for effect in found.effects}
    queued = candidate(aims=(Aim("queue_mean_sec", 4.0),), without=False)
    found = confirmed(queued, Replay(lambda _: replace(BEFORE, queue_mean_sec=0.5)), None)
    assert found is not None
    assert "queue_mean_sec" in {effect.figure for effect in found.effects}


@pytest.mark.parametrize("border", [111, 112, 187, 219, 220, 221, 255])
def test_the_smallest_number_that_does(border: int) -> None:
    replay = Replay(preempts_below(border))
    assert value(confirmed(candidate(), replay, None)) == f"{border}"
    assert border - 1 in replay.values


def test_few_replays_for_a_border_far_away() -> None:
    replay = Replay(preempts_below(7_777))
    found = int(value(confirmed(candidate(), replay, None)) or 0)
    # Within a 256th of the number.
    assert 7_777 <= found <= 7_777 * 257 / 256
    assert len(replay.values) <= 16


def test_the_largest_number_that_makes_a_difference() -> None:
    assert value(confirmed(candidate(), Replay(preempts_below(150), most=150), None)) == "150"
    advice = confirmed(candidate(), Replay(preempts_below(151), most=150), None)
    assert value(advice) is None
    assert advice is not None
    assert advice.remark == ("No number up to 150 does it in a replay, so none is named.")
    assert (advice.known, advice.confidence) == ("estimated", "low")
    assert confirmed(candidate(without=False), Replay(preempts_below(151), most=150), None) is None


def test_what_vllm_refuses_is_not_advised() -> None:
    def refused(number: int) -> Outcome | None:
        return None if number < 130 else preempts_below(120)(number)

    assert value(confirmed(candidate(), Replay(refused), None)) == "130"


def test_other_values_come_in_their_order() -> None:
    sizes = candidate(value=64, others=(32, 16))
    found = Replay(lambda size: replace(BEFORE, preemptions=int(size > 32)))
    assert value(confirmed(sizes, found, None)) == "32"


def test_numbers_in_steps() -> None:
    found = confirmed(candidate(grain=64), Replay(preempts_below(1_000)), None)
    assert value(found) == f"{110 + 14 * 64}"


@pytest.mark.parametrize(("rounds", "found"), [(0, "110"), (1, None), (2, "220"), (3, "183")])
def test_what_is_confirmed_when_the_time_is_over(rounds: int, found: str | None) -> None:
    advice = confirmed(candidate(), Replay(preempts_below(180), rounds=rounds), None)
    assert value(advice) == found
    assert advice is not None
    assert advice.remark is not None
    assert advice.remark.startswith("Time is over.")


def test_a_replay_that_is_unlike_the_session_says_nothing() -> None:
    calm = replace(BEFORE, preemptions=3)
    advice = confirmed(candidate(), Replay(preempts_below(90), before=calm), None)
    assert advice is not None
    assert (advice.known, advice.value, advice.effects) == ("estimated", "110", ())
    assert advice.remark is not None
    assert "3 preemptions in place of 8" in advice.remark


def test_a_queue_that_is_unlike_the_session_s_has_its_units() -> None:
    search = candidate(aims=(Aim("queue_mean_sec", 0.0010721),), without=False)
    long = replace(BEFORE, queue_mean_sec=0.8545)
    advice = confirmed(search, Replay(preempts_below(90), before=long), None)
    assert advice is not None
    assert advice.remark is not None
    assert "854.5 ms in the queue in place of 1.1 ms." in advice.remark


BOTH = (Aim("hit_rate", 100, tokens=200), Aim("preemptions", 8))


def test_all_aims_have_to_be_met() -> None:
    def outcome(number: int) -> Outcome:
        hits = min(300, 2 * number)
        return replace(BEFORE, preemptions=int(number < 120), hit_tokens=hits)

    # 90 % of 200 tokens more than 100.
    assert value(confirmed(candidate(aims=BOTH), Replay(outcome), None)) == "140"
    assert value(confirmed(candidate(aims=BOTH[1:]), Replay(outcome), None)) == "120"


def test_a_queue_that_is_half_as_long_without_more_preemptions() -> None:
    def outcome(number: int) -> Outcome:
        return replace(BEFORE, queue_mean_sec=400 / number, preemptions=8 if number < 230 else 9)

    aims = (Aim("queue_mean_sec", 4.0),)
    search = candidate(aims=aims, without=False)
    assert value(confirmed(search, Replay(outcome), None)) == "200"
    worse = Replay(lambda number: replace(outcome(number), preemptions=9))
    assert confirmed(search, worse, None) is None


def test_the_model_answers_what_it_can() -> None:
    model = Replay(
        lambda number: replace(BEFORE, preemptions=None, hit_tokens=number), known="modelled"
    )
    exact = Replay(preempts_below(90))
    advice = confirmed(candidate(aims=BOTH[:1]), exact, model)
    assert advice is not None
    assert (advice.value, advice.known) == ("280", "modelled")
    assert advice.confidence == "high"
    assert exact.values == []
    # Without vLLM's scheduler it confirms a part, and that is said.
    advice = confirmed(candidate(aims=BOTH), None, model)
    assert advice is not None
    assert (advice.value, advice.known) == ("280", "modelled")
    assert advice.confidence == "medium"
    assert advice.remark is not None
    assert "vLLM is not installed" in advice.remark


def test_the_model_confirms_nothing_that_was_refuted() -> None:
    model = Replay(lambda number: replace(BEFORE, hit_tokens=900), known="modelled")
    exact = Replay(preempts_below(500), rounds=1)
    advice = confirmed(candidate(aims=BOTH), exact, model)
    assert advice is not None
    assert (advice.value, advice.known) == (None, "estimated")
