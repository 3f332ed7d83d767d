# SPDX-License-Identifier: Apache-2.0
"""``profilemate whatif`` as a user runs it: in processes of its own, as text and as JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.renderers.text import whatif as text
from analysis.whatif.clock import StepTime
from analysis.whatif.outcome import Outcome, Served
from analysis.whatif.simulated import Failure, Simulated
from tests.analysis.builder import SessionBuilder
from tests.analysis.invoke import invoke
from tests.whatif.test_exact_configuration import SCHEDULER

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs" / "whatif.md"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty requests, one a second, each with the 48 tokens that all have in common, and 32 of
    its own; as an engine with 100 blocks would have recorded them."""
    built = SessionBuilder(tmp_path_factory.mktemp("whatif") / "session")
    built.metadata(scheduler=SCHEDULER)
    for number in range(30):
        built.requests(
            {
                "timestamp": 1000 * number,
                "input_length": 80,
                "output_length": 4,
                "hash_ids": [1, 2, 3, 100 + number, 200 + number],
                "block_size": 16,
                "request_id": f"r{number}",
                "engine": 0,
                "finish_reason": "length",
            }
        )
    return built.folder


@pytest.fixture(scope="module")
def answered(session: Path) -> subprocess.CompletedProcess[str]:
    """Two pools, each with steps of fewer tokens than requests, too, which vLLM refuses."""
    command = [sys.executable, "-m", "profilemate", "whatif", str(session), "--json", "--jobs=1"]
    options = ["--blocks=1x,5", "--max-num-batched-tokens=2048,32", "--step-ms=10"]
    folder = session.parent
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "VLLM_PROFILING_DIR": str(folder),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "TMPDIR": str(folder),
    }
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, env=environment, check=False
    )


def found(answered: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert answered.returncode == 0, answered.stderr
    content: dict[str, Any] = json.loads(answered.stdout)
    return content


def test_by_hand(answered: subprocess.CompletedProcess[str]) -> None:
    """All but the first request find 3 blocks of 16 tokens in a pool that holds all."""
    baseline = found(answered)["baseline"]
    assert baseline["num_blocks"] == 100
    assert (baseline["query_tokens"], baseline["hit_tokens"]) == (30 * 80, 29 * 48)
    # Each request is alone: a step for its prompt, and one for each token but the first.
    assert (baseline["steps"], baseline["queue_mean_sec"]) == (30 * 4, 0)
    assert baseline["span_sec"] == pytest.approx(29 + 0.04)
    # 3 + 30 * 2 full blocks are cached, and as many as fit into 100 stay.
    assert baseline["evictions"] == 0


def test_what_never_fits(answered: subprocess.CompletedProcess[str]) -> None:
    """80 tokens and the three of the answer that are computed want 6 blocks, and 4 are usable."""
    (small,) = found(answered)["outcomes"]
    assert (small["label"], small["num_blocks"]) == ("5 blocks", 4)
    assert (small["failed_requests"], small["requests"], small["hit_rate"]) == (30, 0, None)


def test_what_vllm_refuses_does_not_stop_the_others(
    answered: subprocess.CompletedProcess[str],
) -> None:
    failures = found(answered)["failures"]
    assert [one["label"] for one in failures] == [
        "32 batched tokens",
        "5 blocks, 32 batched tokens",
    ]
    # pydantic puts its own words around vLLM's.
    assert all(one["reason"].startswith("max_num_batched_tokens (") for one in failures)
    assert not any("Value error" in one["reason"] for one in failures)


def test_nothing_of_vllms_reaches_the_user_and_nothing_is_left(
    answered: subprocess.CompletedProcess[str], session: Path
) -> None:
    """No line of vLLM's, no session of ours, no file of the model that vLLM was given."""
    assert answered.stderr == ""
    assert [path.name for path in session.parent.iterdir()] == [session.name]


def test_every_key_is_documented(answered: subprocess.CompletedProcess[str]) -> None:
    content, page = found(answered), DOCS.read_text()
    keys = {*content, *content["baseline"], *content["step_time"], *content["failures"][0]}
    keys |= {*content["baseline"]["served"]}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--blocks", "half"], "--blocks: 'half' is no size of a pool"),
        (["--block-size", "0"], "--block-size: '0' is no number"),
        (["--prefix-caching", "yes"], "--prefix-caching: 'yes' is none of on, off"),
        (["--scheduling-policy", "lifo"], "--scheduling-policy: 'lifo' is none of"),
        (["--step-ms", "0"], "--step-ms is 0; give more than 0 and less than 1,000,000 ms"),
        (["--jobs", "0"], "--jobs is 0; give a number from 1 to 256"),
        (["--max-num-seqs", ",".join(map(str, range(1, 1500)))], "1,499 combinations"),
    ],
)
def test_wrong_options_are_one_line(session: Path, options: list[str], said: str) -> None:
    result = invoke("whatif", session, *options)
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_wrong_sources_are_one_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0}\n')
    for source, said in (
        (tmp_path / "none", "none; name a session's folder, one of sessions, or a trace's"),
        (trace, "line 1"),
    ):
        result = invoke("whatif", source)
        assert result.returncode == 2
        assert said in result.stderr
        assert result.stderr.count("\n") == 1


def test_without_vllm_it_says_so(session: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profilemate.commands.whatif_exact.find_spec", lambda name: None)
    result = invoke("whatif", session)
    assert result.returncode == 2
    assert "vLLM is not installed for" in result.stderr


def test_an_interrupt_while_a_worker_starts_is_quiet(session: Path) -> None:
    """Ctrl-C goes to the whole group, and to workers that have not come to any line of ours."""
    # As on a terminal: what a shell runs in the background is deaf to it, with all its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "profilemate", "whatif", str(session), "--jobs=2"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    wait_until(lambda: any(map(is_python_up, workers(process.pid))))
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 130
    wait_until(lambda: not group_lives(process.pid))


INTERRUPTED = """
import os, signal, threading, time
from profilemate.interrupts import no_interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
try:
    with no_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        print("started", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_an_interrupt_that_another_thread_takes_waits_for_the_start() -> None:
    """Else a worker would be left without what it is to do."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("started\ninterrupted\n", "")


def workers(parent: int) -> list[Path]:
    """The processes that simulate, in /proc."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    processes = [Path("/proc", child) for child in children]
    return [one for one in processes if "spawn_main" in (one / "cmdline").read_text()]


def is_python_up(process: Path) -> bool:
    """Whether it has its handler of SIGINT, which is there before any module is imported."""
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", (process / "status").read_text())
    return bool(int(caught, 16) & 1 << signal.SIGINT - 1)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def outcome(engine: Any, label: str, hits: int, **more: Any) -> Outcome:
    return Outcome(
        engine=engine,
        label=label,
        num_blocks=999,
        block_size=16,
        policy="lru",
        requests=40,
        query_tokens=10_000,
        hit_tokens=hits,
        evictions=500,
        **more,
    )


def test_the_text_says_what_is_measured_and_what_simulated() -> None:
    simulated = outcome(
        "exact",
        "2x blocks",
        4_000,
        preemptions=7,
        recomputed_tokens=1_234,
        steps=88,
        queue_mean_sec=0.5,
        failed_requests=2,
        served=Served(38, 8_000, 3_000),
    )
    shown = text.render(
        Simulated(
            name="runs/session_1",
            requests=42,
            warm_up=1,
            left_out=2,
            engines=2,
            vllm="0.33.0",
            recorded_vllm="0.32.0",
            step_time=StepTime(0.008, 25e-6, 0.0, 0.0, 90, 0.012, 0.001),
            notes=("something was not recorded",),
            measured=outcome("measured", "as it ran", 2_500),
            baseline=outcome("exact", "as recorded", 2_512),
            outcomes=(simulated,),
            failures=(Failure("1 seqs", "ValueError: no"),),
        )
    )
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for line in (
        "as it ran measured 999 25.00 % 500",
        "as recorded simulated 999 25.12 % 500",
        "2x blocks simulated 999 40.00 % 500",
        "2x blocks 7 1,234 88 500.0 ms n/a",
        "2x blocks: 2 requests can never fit into the pool.",
        "2x blocks: of all 38 that it served, the hit rate is 37.50 %.",
        "- something was not recorded",
        "1 seqs: ValueError: no",
    ):
        assert line in lines, shown
    flowing = " ".join(lines)
    assert "The hit rates are of the same 40 requests: of those that every configuration" in flowing
    assert "2 that not every one served are left out." in flowing
    assert "42 requests on 2 engines, the first 1 as warm-up, simulated through" in flowing
    assert "through vLLM 0.33.0's own scheduler" in flowing
    assert "recorded with 0.32.0. A step takes 8.0 ms + 25 us a prefill token on" in flowing
    assert "has a hit rate 0.12 points above that of the session, and +0.0 % evictions" in flowing
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        (0.1, 0.15, "Requests wait 150.0 ms on average in the simulation, and waited 100.0 ms in"),
        (0.0007, 1.14, "700 us in the session: the simulated queue times are no more than"),
        (1.14, 0.0, "and waited 1.14 s in the session: the simulated queue times are"),
        (0.0, 0.0005, "Requests wait 500 us on average in the simulation, and waited 0 us in"),
    ],
)
def test_queues_that_are_far_from_the_recorded_ones_are_reported(
    was: float, now: float, says: str
) -> None:
    found = Simulated(
        name="runs/session_1",
        requests=42,
        warm_up=0,
        left_out=0,
        engines=1,
        vllm="0.33.0",
        recorded_vllm="0.33.0",
        step_time=StepTime(0.008),
        notes=(),
        measured=outcome("measured", "as it ran", 2_500, queue_mean_sec=was),
        baseline=outcome("exact", "as recorded", 2_500, queue_mean_sec=now),
        outcomes=(),
        failures=(),
    )
    assert says in " ".join(text.render(found).split())
