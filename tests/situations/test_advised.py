# SPDX-License-Identifier: Apache-2.0
"""What advice promises, and what vLLM's scheduler does at the advised setting.

Each session is of the real scheduler. Its advice is replayed, in this process. Then the same
requests run again, in a scheduler with the advised setting, and its session has the figures that
were promised.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import profilemate.simulation.processes
from analysis import Summary, open_session, summarize
from analysis.judgement import summarizing
from analysis.judgement.advice.modelled import Modelled
from analysis.summary import Advice
from analysis.whatif import workload
from analysis.whatif.configuration import Configuration
from profilemate.commands.shared.replaying import Replays
from profilemate.simulation.engine import Engine
from profilemate.simulation.processes import Deadline, OutOfTime
from profilemate.simulation.worker import Done, Task
from tests.analysis.invoke import invoke
from tests.situations.bench import BLOCK, Bench
from tests.support.scheduler import RequestMaker

STEP_SEC = 0.008

ROOT = Path(__file__).resolve().parent.parent.parent


class InThisProcess:
    """What ``Simulations`` does, without processes; notes each pool that was tried."""

    jobs = 2

    def __init__(self, model: Path, rounds: int = 1_000) -> None:
        self._model, self._rounds = model, rounds
        self.tried: list[int] = []

    def run(
        self, task: Task, configurations: Sequence[Configuration], *, deadline: Deadline
    ) -> list[Done]:
        self._rounds -= 1
        if self._rounds < 0:
            raise OutOfTime
        self.tried += [one.num_blocks for one in configurations]
        return [Done(self._one(task, one), "here") for one in configurations]

    def _one(self, task: Task, configuration: Configuration) -> Any:
        known = task.prefixes.of_engine(0) if task.prefixes else None
        begin = {"begin_sec": task.begin_sec, "prefixes": known}
        return Engine(self._model, configuration, task.workload, task.step_time, **begin).run()


@pytest.fixture
def replayed(model: Path) -> Callable[..., Summary]:
    """The summary of a session whose advice was replayed."""

    def summary(folder: Path, *, exact: bool = True, rounds: int = 1_000) -> Summary:
        session = open_session(folder)
        read = cache(lambda: workload.of_session(session))
        simulations: Any = InThisProcess(model, rounds)
        replays = Replays(session, read, simulations, 600) if exact else None
        return summarizing.replayed(summarize(session), replays, Modelled(read))

    return summary


def of(summary: Summary, about: str) -> Advice:
    (found,) = [one for one in summary.advice if one.about == about]
    return found


def effect(advice: Advice, figure: str) -> tuple[float | None, float | None]:
    (found,) = [one for one in advice.effects if one.figure == figure]
    return found.before, found.after


def ran(bench: Bench, usable: int, requests: Sequence[tuple[int, int]], **settings: Any) -> Path:
    """The session of these requests, of so many prompt and answer tokens, which come at once.

    A step takes 8 ms, 25 us a token and 150 us a request.
    """
    engine = bench.engine(usable, **settings)
    make = RequestMaker(settings.get("block_size", BLOCK))
    for number, (prompt, answer) in enumerate(requests):
        first = 5_000 * number
        engine.add(make(f"r{number}", list(range(first, first + prompt)), answer))
    seconds = STEP_SEC
    while engine.scheduler.has_unfinished_requests():
        output = engine.schedule(seconds)
        scheduled = output.num_scheduled_tokens
        seconds = STEP_SEC + 25e-6 * sum(scheduled.values()) + 150e-6 * len(scheduled)
        engine.update(output)
    return engine.end().folder


def advised_pool(summary: Summary) -> int:
    """Usable blocks of the advised pool."""
    size = summary.facts.bytes_per_block
    advice = of(summary, "pool")
    assert size is not None
    assert advice.flag == "--kv-cache-memory-bytes"
    return int(advice.value or 0) // size - 1


def test_a_pool_in_which_two_requests_run_to_their_end(
    bench: Bench, replayed: Callable[..., Summary]
) -> None:
    """Each has 160 + 199 tokens in its cache at its end, 23 blocks: 46, and the null block."""
    requests = [(160, 200)] * 2
    found = replayed(ran(bench, 31, requests))
    advice = of(found, "pool")
    assert advised_pool(found) + 1 == 47
    assert (advice.known, advice.confidence) == ("replayed", "high")
    assert effect(advice, "preemptions") == (1, 0)
    assert preempted(ran(bench, 46, requests)) == 0
    assert preempted(ran(bench, 45, requests)) == 1


def test_a_pool_in_which_ten_requests_run_to_their_end(
    bench: Bench, replayed: Callable[..., Summary]
) -> None:
    """A tenth more blocks would only change which requests are preempted."""
    requests = [(128, 200)] * 10
    found = replayed(ran(bench, 64, requests))
    assert advised_pool(found) == 210
    advice = of(found, "pool")
    assert effect(advice, "preemptions") == (9, 0)
    assert effect(advice, "recomputed_tokens") == (1_241, 0)
    assert preempted(ran(bench, 210, requests)) == 0
    assert preempted(ran(bench, 209, requests)) > 0


def with_priorities(bench: Bench, usable: int) -> Path:
    """Twelve requests of three priorities, of which the more urgent ones come later."""
    engine = bench.engine(usable, scheduling_policy="priority")
    for number in range(12):
        prompt = list(range(5_000 * number, 5_000 * number + 128))
        urgency = {"priority": 2 - number // 4, "arrival_time": float(number)}
        engine.add(bench.request(f"r{number}", prompt, 60 + 10 * number, **urgency))
        engine.step(4)
    engine.run()
    return engine.end().folder


def test_a_pool_in_which_priorities_preempt_nobody(
    bench: Bench, replayed: Callable[..., Summary]
) -> None:
    folder = with_priorities(bench, 64)
    assert preempted(folder) > 0
    usable = advised_pool(replayed(folder))
    assert preempted(with_priorities(bench, usable)) == 0
    assert preempted(with_priorities(bench, usable - 1)) > 0


def preempted(folder: Path) -> int:
    return summarize(open_session(folder)).preemptions.count


def in_turns(bench: Bench, usable: int) -> Path:
    """Six prompts of 128 tokens, one after the other, five times."""
    engine = bench.engine(usable)
    for turn in range(5):
        for number in range(6):
            name, first = f"t{turn} p{number}", 1_000 * number
            engine.run(bench.request(name, list(range(first, first + 128)), 8))
            engine.wait(0.2)
    return engine.end().folder


def test_a_pool_that_keeps_what_is_asked_for_again(
    bench: Bench, replayed: Callable[..., Summary]
) -> None:
    found = replayed(in_turns(bench, 40), exact=False)
    advice = of(found, "pool")
    assert (advice.known, advice.confidence, advice.remark) == ("modelled", "high", None)
    before, after = effect(advice, "hit_rate")
    assert (before, hit_rate(in_turns(bench, 40))) == (0.0, 0.0)
    # All turns but the first find 7 of the 8 blocks of their prompt.
    assert (after, hit_rate(in_turns(bench, advised_pool(found)))) == (0.7, 0.7)


def hit_rate(folder: Path) -> float | None:
    return summarize(open_session(folder)).prefix_cache.true.token_rate


def queue(folder: Path) -> float:
    found = summarize(open_session(folder)).scheduling.queued.mean_sec
    assert found is not None
    return found


def test_more_requests_at_once_halve_the_queue(
    bench: Bench, replayed: Callable[..., Summary]
) -> None:
    requests = [(64, 20 + 11 * number % 37) for number in range(40)]
    folder = ran(bench, 400, requests, max_num_seqs=4)
    advice = of(replayed(folder), "requests at once")
    assert (advice.flag, advice.known, advice.confidence) == (
        "--max-num-seqs",
        "replayed",
        "medium",
    )
    before, after = effect(advice, "queue_mean_sec")
    real = queue(ran(bench, 400, requests, max_num_seqs=int(advice.value or 0)))
    # When a request came is known to a step.
    assert queue(folder) == pytest.approx(before, rel=0.05)
    assert real == pytest.approx(after, rel=0.05)
    assert real <= queue(folder) / 2 + STEP_SEC


def test_larger_steps_halve_the_queue(bench: Bench, replayed: Callable[..., Summary]) -> None:
    requests, settings = [(320, 8 + number % 5) for number in range(24)], {"max_num_seqs": 32}
    folder = ran(bench, 1_000, requests, max_num_batched_tokens=128, **settings)
    advice = of(replayed(folder), "step size")
    assert (advice.flag, advice.known) == ("--max-num-batched-tokens", "replayed")
    before, after = effect(advice, "queue_mean_sec")
    value = int(advice.value or 0)
    real = queue(ran(bench, 1_000, requests, max_num_batched_tokens=value, **settings))
    assert queue(folder) == pytest.approx(before, rel=0.05)
    assert real == pytest.approx(after, rel=0.05)
    assert real <= queue(folder) / 2 + STEP_SEC


def sharing(bench: Bench, block_size: int) -> Path:
    """Twelve prompts that share 48 tokens, one after the other."""
    engine = bench.engine(60 * 128 // block_size, block_size=block_size)
    make = RequestMaker(block_size)
    for number in range(12):
        own = range(1_000 * (number + 1), 1_000 * (number + 1) + 252)
        engine.run(make(f"r{number}", [*range(48), *own], 8))
    return engine.end().folder


def test_blocks_in_which_prompts_share_something(
    bench: Bench, replayed: Callable[..., Summary]
) -> None:
    advice = of(replayed(sharing(bench, 128)), "block size")
    assert (advice.flag, advice.value, advice.known) == ("--block-size", "32", "replayed")
    # Eleven of them find 32 of their 300 tokens.
    promised = pytest.approx((0.0, 11 * 32 / 3_600))
    assert effect(advice, "hit_rate") == promised
    assert (hit_rate(sharing(bench, 128)), hit_rate(sharing(bench, 32))) == promised


def test_smaller_blocks_have_fewer_empty_slots(
    bench: Bench, replayed: Callable[..., Summary]
) -> None:
    requests = [(140, 20)] * 12
    advice = of(replayed(ran(bench, 60, requests, block_size=128)), "block size")
    assert (advice.flag, advice.value, advice.known) == ("--block-size", "64", "modelled")
    before, after = effect(advice, "empty_share")
    for size, promised in ((128, before), (64, after)):
        lost = summarize(open_session(ran(bench, 120, requests, block_size=size))).fragmentation
        assert lost is not None
        assert lost.actual.at_end == promised


def test_a_length_that_fits(bench: Bench, replayed: Callable[..., Summary]) -> None:
    engine = bench.engine(10)
    engine.add(bench.request("giant", list(range(400)), 8))
    engine.step(5)
    advice = of(replayed(engine.end().folder), "length")
    assert (advice.flag, advice.known) == ("--max-model-len", "modelled")
    assert effect(advice, "can_never_run") == (1, 0)
    limit = int(advice.value or 0)
    longest = summarize(open_session(ran(bench, 10, [(limit - 8, 8)])))
    assert (longest.requests.ended, longest.admission.too_large or 0) == (1, 0)


def test_a_replay_whose_time_is_over_names_what_it_has_confirmed(
    bench: Bench, replayed: Callable[..., Summary]
) -> None:
    folder = ran(bench, 64, [(128, 200)] * 10)
    # One round for the recorded pool and the first number, one for two larger numbers.
    found = replayed(folder, rounds=2)
    advice = of(found, "pool")
    assert advised_pool(found) >= 210
    assert effect(advice, "preemptions") == (9, 0)
    assert advice.remark is not None
    assert "A smaller number may do." in advice.remark


def test_a_replay_that_had_no_time_to_confirm_a_number(
    bench: Bench, replayed: Callable[..., Summary]
) -> None:
    folder = ran(bench, 64, [(128, 200)] * 10)
    advice = of(replayed(folder, rounds=1), "pool")
    assert (advice.flag, advice.value, advice.confidence) == (None, None, "low")
    assert "more blocks than its 64." in advice.says
    assert advice.remark is not None
    assert "--replay-for" in advice.remark
    advice = of(replayed(folder, rounds=0), "pool")
    assert (advice.known, advice.confidence, advice.effects) == ("estimated", "low", ())
    assert advice.remark is not None
    assert "--replay-for" in advice.remark


def test_without_vllm_it_is_an_estimate(bench: Bench, replayed: Callable[..., Summary]) -> None:
    folder = ran(bench, 64, [(128, 200)] * 10)
    alone, library = of(replayed(folder, exact=False), "pool"), summarize(open_session(folder))
    assert (alone.known, alone.confidence) == ("estimated", "low")
    assert alone.remark is not None
    assert "vLLM is not installed here" in alone.remark
    assert of(library, "pool").remark is None
    assert "high" not in {one.confidence for one in library.advice if one.known == "estimated"}


def command(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """``profilemate ARGUMENTS``, as a user runs it; files that it makes go into the folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    words = [sys.executable, "-m", "profilemate", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, env=environment, check=False)


def test_the_commands_replay_what_they_advise(bench: Bench, tmp_path: Path) -> None:
    """Through vLLM's scheduler, in processes of their own; and the page says the same."""
    folder = ran(bench, 31, [(160, 200)] * 2)
    said = command("summary", folder, "--json", "--replay-for", "5m", folder=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    (advice,) = (one for one in json.loads(said.stdout)["advice"] if one["about"] == "pool")
    assert advice["value"] == f"{47 * 1024}"
    assert (advice["known"], advice["confidence"], advice["remark"]) == ("replayed", "high", None)
    assert {"figure": "preemptions", "before": 1, "after": 0} in advice["effects"]
    page = tmp_path / "page.html"
    said = command("report", folder, "-o", page, "--replay-for", "5m", folder=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    text = page.read_text()
    assert "How known: replayed through vLLM&#x27;s scheduler: preemptions 1 -&gt; 0; " in text
    assert f"--kv-cache-memory-bytes {47 * 1024}" in text
    assert not list(tmp_path.glob("tmp*")), "processes have left files"


def test_no_replay(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ran(bench, 31, [(160, 200)] * 2)

    def never(*_: object) -> None:
        pytest.fail("something is replayed")

    monkeypatch.setattr(summarizing, "replayed", never)
    monkeypatch.setattr(profilemate.simulation.processes.Simulations, "start", never)
    said = invoke("summary", folder, "--no-replay")
    assert "How known: estimated, not replayed\n" in said.stdout
    assert "(confidence: low)" in invoke("summary", folder, "--no-replay", "--full").stdout
    said = invoke("report", folder, "--no-replay")
    assert "How known: estimated, not replayed<" in (folder / "report.html").read_text()


def test_nothing_is_replayed_where_no_number_is_advised(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ran(bench, 100, [(64, 4)] * 3)

    def never(*_: object) -> None:
        pytest.fail("something is replayed")

    monkeypatch.setattr(summarizing, "replayed", never)
    monkeypatch.setattr(profilemate.simulation.processes.Simulations, "start", never)
    assert invoke("summary", folder).returncode == 0


@pytest.mark.parametrize("time", ["0", "25h"])
def test_a_time_for_replays_that_makes_no_sense(bench: Bench, time: str) -> None:
    folder = ran(bench, 31, [(16, 2)])
    said = invoke("summary", folder, "--replay-for", time)
    assert (said.returncode, said.stdout) == (2, "")
    assert "--replay-for is" in said.stderr


def test_a_replay_that_takes_too_long_is_ended(bench: Bench) -> None:
    """Importing vLLM alone takes longer."""
    folder = ran(bench, 31, [(160, 200)] * 2)
    said = invoke("summary", folder, "--replay-for", "500ms")
    assert said.returncode == 0
    words = " ".join(said.stdout.split())
    assert "estimated, not replayed. The replay was ended after 0.5 s; --replay-for" in words
    assert "Give the KV cache 4 blocks more than its 31" in words
