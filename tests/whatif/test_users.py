# SPDX-License-Identifier: Apache-2.0
"""Closed loops: users who wait for answers, against what vLLM's scheduler did with such users."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.errors import RuleError
from analysis.whatif.configuration import users
from analysis.whatif.users import EACH, turns
from analysis.whatif.workload import read_workload
from analysis.wording.formats import seconds
from profilemate.simulation.coming import Coming
from tests.analysis.invoke import invoke
from tests.support.scheduler import ANSWER, RequestMaker, tokens
from tests.whatif import truth
from tests.whatif.simulating import Recorded
from tests.whatif.test_exact import LIMITS
from tests.whatif.test_traces import trace
from tests.whatif.test_traces import turns as lines
from tests.whatif.truth import Truth

pytestmark = pytest.mark.usefixtures("hooks_on")

CONVERSATIONS = 150


class Users:
    """Conversations of one to six turns, half a second to four between them, each of which has all
    that came before. With a number of users, each takes up the next one when one has ended."""

    def __init__(self, at_once: int | None) -> None:
        chance = random.Random(3)
        self._make = RequestMaker(16)
        self._lengths = [chance.randint(1, 6) for _ in range(CONVERSATIONS)]
        self._thinks = [[chance.uniform(500, 4_000) for _ in range(6)] for _ in self._lengths]
        self._news = [[chance.randint(10, 150) for _ in range(6)] for _ in self._lengths]
        self._answers = [[chance.randint(5, 60) for _ in range(6)] for _ in self._lengths]
        starts = sorted(chance.uniform(0, 90_000) for _ in self._lengths)
        self._next = CONVERSATIONS if at_once is None else at_once
        self.first = [
            (starts[number] if at_once is None else 0.0, self._turn(number, 0))
            for number in range(self._next)
        ]

    def then(self, name: str) -> list[tuple[float, Any]]:
        """What comes after this request."""
        number, turn = map(int, name.split("."))
        if turn + 1 < self._lengths[number]:
            return [(self._thinks[number][turn], self._turn(number, turn + 1))]
        if self._next == CONVERSATIONS:
            return []
        self._next += 1
        return [(0.0, self._turn(self._next - 1, 0))]

    def _turn(self, number: int, turn: int) -> Any:
        prompt = tokens(999, 64)
        for before in range(turn + 1):
            prompt += tokens(100 * number + before, self._news[number][before])
            if before < turn:
                prompt += [ANSWER] * self._answers[number][before]
        return self._make(f"{number}.{turn}", prompt, self._answers[number][turn])


def slow(output: Any) -> float:
    """A device that takes three times as long as that of ``truth.device``."""
    return 3 * truth.device(output)


def ran(
    model: Path, folder: Path, blocks: int, at_once: int | None, step_sec: Any = truth.device
) -> Truth:
    loop = Users(at_once)
    return truth.run(
        model,
        folder,
        blocks,
        requests=loop.first,
        then=loop.then,
        step_sec=step_sec,
        **LIMITS,
    )


@pytest.fixture(scope="module")
def source(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Users in a small pool, each of whom began by himself."""
    return Recorded(ran(model, tmp_path_factory.mktemp("users") / "s", 250, None).session)


def test_a_user_for_each_conversation_as_recorded(source: Recorded, model: Path) -> None:
    found = source.simulate(model, users=EACH)
    assert found.query_tokens == source.measured.query_tokens
    assert_close(found, source.measured)
    assert (found.evictions or 0) > 1_000


def assert_close(found: Any, true: Any) -> None:
    assert abs((found.hit_rate or 0) - true.hit_rate) <= 0.002
    assert abs((found.evictions or 0) - true.evictions) <= 0.01 * true.evictions
    assert abs((found.steps or 0) - true.steps) <= 0.01 * true.steps


@pytest.mark.parametrize(
    ("blocks", "at_once"), [(160, 4), (350, None), (450, 12), (250, 20)], ids=str
)
def test_other_users_and_pools(
    source: Recorded, model: Path, tmp_path: Path, blocks: int, at_once: int | None
) -> None:
    true = ran(model, tmp_path / "s", blocks, at_once)
    found = source.simulate(model, blocks, users=at_once or EACH)
    assert_close(found, true)


def test_users_of_a_slower_engine_ask_later(source: Recorded, model: Path, tmp_path: Path) -> None:
    """An open loop asks all the same."""
    true = ran(model, tmp_path / "s", 250, None, step_sec=slow)
    source = replace_step_time(source, 3.0)
    closed, opened = source.simulate(model, users=EACH), source.simulate(model)
    assert abs((closed.hit_rate or 0) - true.hit_rate) < 0.005
    assert abs((closed.evictions or 0) - true.evictions) < 0.01 * true.evictions
    assert (opened.hit_rate or 0) > true.hit_rate + 0.05


def replace_step_time(source: Recorded, factor: float) -> Recorded:
    """The same session on a device that takes so many times as long."""
    other = object.__new__(Recorded)
    other.__dict__ |= source.__dict__
    taken = source.step_time
    names = ("constant_sec", "prefill_token_sec", "decode_token_sec", "request_sec")
    other.step_time = replace(taken, **{name: factor * getattr(taken, name) for name in names})
    return other


def test_turns_follow_answers(source: Recorded) -> None:
    found = turns(source.workload)
    lengths = Users(None)._lengths
    assert (found.after < 0).sum() == CONVERSATIONS
    assert sorted(np.unique(found.first, return_counts=True)[1]) == sorted(lengths)
    thinks = found.think_sec[found.after >= 0]
    assert 0.45 < thinks.min() < thinks.max() < 4.1


def test_a_request_that_came_before_the_answer_follows_none(source: Recorded) -> None:
    workload = source.workload
    before = replace(workload, finish_sec=workload.finish_sec + 10)
    assert (turns(before).after < 0).all()


def test_a_number_of_users_takes_up_one_conversation_after_the_other(tmp_path: Path) -> None:
    """Two conversations: one of three turns, and one of one."""
    workload = read_workload(trace(tmp_path, *lines()))
    coming = Coming(workload, 1)
    assert coming.pop() == (0, 0)
    assert not coming
    coming.ended(0, 5.0)
    assert coming.pop() == (7.0, 2)
    coming.ended(2, 8.0)
    assert coming.pop() == (pytest.approx(8.1), 3)
    assert not coming
    coming.ended(3, 9.0)
    assert coming.pop() == (9.0, 1)
    coming.ended(1, 10.0)
    assert not coming
    both = Coming(workload, 2)
    assert sorted((both.pop(), both.pop())) == [(0, 0), (0, 1)]


def test_numbers_of_users() -> None:
    assert users("8, each,16") == (8, EACH, 16)
    for text in ("0", "x", "-1", ""):
        with pytest.raises(RuleError, match="write 8, or each"):
            users(text)


def test_the_command_says_who_asked(tmp_path: Path) -> None:
    path = trace(tmp_path, *lines())
    answer = invoke("whatif", path, "--blocks=100", "--users=1,each", "--json", "--jobs=1")
    found = json.loads(answer.stdout)
    assert [one["label"] for one in found["outcomes"]] == [
        "100 blocks, 1 user",
        "100 blocks, a user each",
    ]
    assert any("2 come after an answer" in note for note in found["notes"])
    # One after the other, or beside each other.
    alone, beside = (one["span_sec"] for one in found["outcomes"])
    assert alone > beside
    said = invoke("whatif", path, "--blocks=100", "--users=1,each", "--jobs=1").stdout
    (head,) = (line for line in said.splitlines() if "queued" in line)
    assert head.split()[-1] == "time"
    for label, span in (("1 user", alone), ("a user each", beside)):
        (row,) = (line for line in said.splitlines() if label in line and "simulated" not in line)
        assert row.endswith(seconds(span))
    # The first line has the path.
    assert all(len(line) <= 80 for line in said.splitlines()[1:])
    refused = invoke("whatif", path, "--blocks=100", "--users=0")
    assert (refused.returncode, "--users: 0 users send nothing" in refused.stderr) == (2, True)
