# SPDX-License-Identifier: Apache-2.0
"""``LLM`` whose engine and workers are processes of their own, spawned and forked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from profilemate import collector
from tests.support import engine
from tests.support.engine import BLOCK_SIZE, Application, Lab

pytestmark = pytest.mark.engine

STEPS_LOG = "steps"
"""Where the forked application logs a byte a step, in the engine's own thread."""
ANSWERS = 8 + 24
"""What the application asks for before its endless part."""


@pytest.fixture(scope="module")
def started(lab: Lab) -> Iterator[tuple[Application, Application]]:
    """Two tensor-parallel workers, spawned; and an engine that is forked and goes on for ever."""
    # Kubernetes adds this one where a service is called vllm-profiling.
    invented = {"VLLM_PROFILING_PORT": "tcp://10.0.0.1:80"}
    with (
        lab.application("spawned", "--tensor-parallel-size=2") as spawned,
        lab.application(
            "forked", "--fork", "--endless", f"--log-steps={lab.folder / STEPS_LOG}", **invented
        ) as forked,
    ):
        yield spawned, forked


@dataclass(frozen=True)
class Killed:
    """A run whose engine was killed in the middle of an answer."""

    application: Application
    session: Path
    engine_pid: int
    before: Path
    """A session made of the journal as it was just before."""


@pytest.fixture(scope="module")
def killed(started: tuple[Application, Application], lab: Lab) -> Killed:
    application = started[1]
    application.wait_for_result()
    session = application.session
    (pid,) = engine.wait_for_engines(session, 1).values()
    engine.wait_for(
        "the endless answers to begin",
        lambda: (
            len(engine.requests(session)) == ANSWERS
            and engine.rows(session, "kv_cache_usage")[-1]["running_reqs"] == "2"
        ),
        engine.END_SECONDS,
    )
    before = engine.copy_journal(session, lab.folder / "before the kill")
    engine.kill(pid)
    engine.wait_for(
        "the tables to be complete",
        lambda: engine.metadata(session).get("complete"),
        engine.SETTLED_SECONDS,
    )
    # An LLM of vLLM 0.32 waits for ever for a killed engine, with profilemate or without.
    engine.kill(application.process.pid)
    engine.wait_until_settled(application.sessions)
    collector.finalize(before)
    return Killed(application, session, pid, before)


@pytest.fixture(scope="module")
def spawned(started: tuple[Application, Application], killed: Killed) -> Application:
    """The run with two workers, once it has ended."""
    started[0].wait()
    return started[0]


def test_the_forked_engine_joins_its_parents_session(killed: Killed) -> None:
    parent = killed.application.process.pid
    assert killed.engine_pid != parent
    assert f"_{parent}_" in killed.session.name
    assert "--fork" in engine.metadata(killed.session)["argv"]


def test_a_killed_engine_loses_nothing_but_its_step(killed: Killed, lab: Lab) -> None:
    ended = (lab.folder / STEPS_LOG).stat().st_size
    scheduled = engine.total(engine.rows(killed.session, "scheduler_steps"), "repeats")
    # With asynchronous scheduling, one more has been scheduled than has ended. The steps are slower
    # than two writes, unless a busy machine gave the writing thread no processor.
    assert ended - 2 <= scheduled <= ended + 2
    engine.assert_begin_the_same(engine.tables(killed.before), engine.tables(killed.session))
    known = engine.metadata(killed.session)
    assert [process["ended"] for process in known["processes"]] == ["killed"]
    last = engine.rows(killed.session, "scheduler_steps")[-1]
    assert last["decode_tokens"] == "2", "it was not killed in the middle of the answers"
    answered = engine.requests(killed.session)
    assert len(answered) == ANSWERS
    assert engine.moved(killed.session, "free") < engine.moved(killed.session, "allocate")


def test_names_that_only_look_like_ours_stay_unknown_to_vllm(killed: Killed) -> None:
    said = r"Unknown vLLM environment variable detected: (\w+)"
    assert set(re.findall(said, killed.application.log)) == {"VLLM_PROFILING_PORT"}


def test_spawned_processes_join_their_parents_session(spawned: Application) -> None:
    assert spawned.process.returncode == 3, spawned.log[-3000:]
    # Of the engine and its two workers, only the engine has something to record.
    engine.assert_sound(spawned.session)
    assert engine.engine_pids(spawned.session)[0] != spawned.process.pid
    assert f"_{spawned.process.pid}_" in spawned.session.name
    assert engine.metadata(spawned.session)["parallel"]["tensor"] == 2
    engine.assert_answered(spawned.session, spawned.result)
    evictions = engine.rows(spawned.session, "kv_cache_evictions")
    assert engine.moved(spawned.session, "cache") == len(evictions) > 0


def test_seven_of_eight_identical_prompts_hit(spawned: Application) -> None:
    hits = [
        row["hit_tokens"]
        for row in engine.requests(spawned.session)
        if int(row["request_id"].partition("-")[0]) < 8
    ]
    assert sorted(hits) == [0] + [31 * BLOCK_SIZE] * 7
