# SPDX-License-Identifier: Apache-2.0
"""A server whose collector is killed under load, and then the API server, and then the engine.

Nobody is left to complete the tables, so the analyzer does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.server import Server
from profilemate import collector
from tests.support import engine
from tests.support.engine import Answer, Lab, answer
from tests.support.scheduler import tokens

pytestmark = pytest.mark.engine

SHORT, LONG, ENDLESS = 30, 400, 1800
"""Tokens asked for."""
READ = 50
"""Tokens read of an answer before something is killed."""


@dataclass(frozen=True)
class Killed:
    """What was seen, and the session as the analyzer left it."""

    session: Path
    answers: list[Answer]
    """Four short ones, one whose collector was killed half-way, one whose API server was."""
    caught_up: dict[str, bytes]
    """The tables when the collector had seen the short answers."""
    cut_off: dict[str, bytes]
    """The tables after the collector had been killed."""
    before: Path
    """A session made of the journal as it was just before the API server was killed."""
    summary: dict[str, Any]
    """What the analyzer said, as JSON."""


@pytest.fixture(scope="module")
def killed(servers: tuple[Server, Server], lab: Lab) -> Killed:
    server = servers[1]
    session = engine.session_of(server, lab.sessions("servers"))
    (engine_pid,) = engine.engine_pids(session).values()
    answers = [answer(server.port, tokens(seed, 150), SHORT) for seed in range(4)]
    engine.wait_for(
        "rows of the short answers",
        lambda: len(engine.requests(session)) == len(answers),
        engine.SETTLED_SECONDS,
    )
    caught_up = engine.tables(session)

    answers.append(Answer(server.port, tokens(4, 150), LONG).read(READ))
    engine.kill(engine.collector_pid(session))
    answers[-1].read()
    cut_off = engine.tables(session)

    answers.append(Answer(server.port, tokens(5, 150), ENDLESS).read(READ))
    before = engine.copy_journal(session, lab.folder / "before the server's death")
    engine.kill(server.process.pid)
    answers[-1].read()
    size = engine.journal_size(session)
    engine.wait_for(
        "the engine to go on", lambda: engine.journal_size(session) > size, engine.END_SECONDS
    )
    engine.kill(engine_pid)
    collector.finalize(before)
    return Killed(session, answers, caught_up, cut_off, before, analyze(session))


def analyze(session: Path) -> dict[str, Any]:
    """What ``python -m analysis --json`` says of a session."""
    done = subprocess.run(
        [sys.executable, "-m", "analysis", str(session), "--json"],
        cwd=engine.ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_answers_do_not_depend_on_the_collector(killed: Killed) -> None:
    *whole, _ = killed.answers
    assert [len(answer.tokens) for answer in whole] == [SHORT] * 4 + [LONG]
    assert {answer.finish_reason for answer in whole} == {"length"}
    assert killed.answers[-1].finish_reason is None
    # Nothing was written any more: the rest of the long answer is in none of the tables.
    assert killed.cut_off["requests.jsonl"].count(b"\n") == 4


def test_the_analyzer_completes_the_session(killed: Killed) -> None:
    assert killed.summary["session"]["state"] == "complete"
    known = engine.metadata(killed.session)
    assert known["complete"]
    assert [process["ended"] for process in known["processes"]] == ["killed"]
    assert known["cost"]["collector_lag_sec"] is None, "nobody followed it to its end"
    assert not (killed.session / "journal").exists()
    assert len(engine.requests(killed.session)) == 5


def test_every_token_that_reached_the_client_is_in_the_tables(killed: Killed) -> None:
    # The step that computes a prompt makes the first token, the others are decoded.
    decoded = sum(len(answer.tokens) - 1 for answer in killed.answers)
    steps = engine.rows(killed.session, "scheduler_steps")
    assert engine.total(steps, "decode_tokens") >= decoded
    assert steps[-1]["decode_tokens"] == "1", "it was not killed in the middle of an answer"


def test_tables_are_the_same_however_they_are_made(killed: Killed) -> None:
    whole = engine.tables(killed.session)
    engine.assert_begin_the_same(killed.caught_up, whole)
    engine.assert_begin_the_same(killed.cut_off, whole)
    engine.assert_begin_the_same(engine.tables(killed.before), whole)
