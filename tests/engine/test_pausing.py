# SPDX-License-Identifier: Apache-2.0
"""A server whose recording pauses and goes on: what is recorded is what vLLM counted meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from demo.server import Server
from tests.support import engine
from tests.support.engine import ROOT, START_SECONDS, Answer, Lab, answer
from tests.support.scheduler import tokens

pytestmark = pytest.mark.engine

PROMPTS, OUTPUT = 6, 8
SHORTEST, KEEPER = 100, 40
"""Tokens of the prompts, and of those that keep the engine busy."""


@dataclass(frozen=True)
class Paused:
    """A session with two pauses, of which the second never ended.

    ``hits``: tokens that vLLM's prefix cache had found at the end of the first period, of the
    pause, and of the second period. ``grown_bytes``: by how much the journal grew in the pause.
    """

    session: Path
    log: str
    said: dict[str, str]
    hits: list[float]
    grown_bytes: int


def profilemate(*arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    """Run a command; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "profilemate", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=engine.END_SECONDS,
        check=False,
    )
    assert done.returncode in codes, done.stderr
    return done.stdout + done.stderr


@contextmanager
def kept_busy(port: int) -> Iterator[None]:
    """One request after the other runs in the block, so that the engine has steps."""
    is_done = threading.Event()

    def run() -> None:
        number = 0
        while not is_done.is_set():
            number += 1
            streamed = Answer(port, tokens(1_000 + number, KEEPER), 1_500)
            while streamed.finish_reason is None and not is_done.is_set():
                streamed.read(len(streamed.tokens) + 1)
            streamed.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


@pytest.fixture(scope="module")
def paused(lab: Lab) -> Iterator[Paused]:
    with lab.server("pausing") as server:
        server.wait_until_ready(START_SECONDS)
        session = engine.session_of(server, lab.sessions("pausing"))
        with kept_busy(server.port):
            found = run(server.port, session)
        yield finished(server, found)


def run(port: int, session: Path) -> Paused:
    """Four parts, between them pause, resume and pause."""
    said: dict[str, str] = {}
    hits: list[float] = []

    def count() -> None:
        hits.append(engine.metric(engine.get(port, "/metrics"), "vllm:prefix_cache_hits_total"))

    def journal_size() -> int:
        return sum(path.stat().st_size for path in (session / "journal").glob("engine0*.journal"))

    load(port, 0)
    count()
    said["pause"] = profilemate("pause", str(session))
    said["mark"] = profilemate("mark", "in the pause", str(session))
    begun = journal_size()
    load(port, 1)
    count()
    grown = journal_size() - begun
    said["resume"] = profilemate("resume", str(session))
    load(port, 2)
    count()
    said["page"], said["page at"] = engine.get(port, "/metrics"), str(time.time())
    said["pause again"] = profilemate("pause", "--wait", "0", str(session))
    engine.wait_for(
        "the second pause",
        lambda: len(pauses(session)) == 2,
        engine.SETTLED_SECONDS,
    )
    said["summary of running"] = profilemate("summary", "--json", str(session))
    return Paused(session, "", said, hits, grown)


def finished(server: Server, found: Paused) -> Paused:
    """The same once the server has ended."""
    server.stop()
    engine.wait_for(
        "the session to be complete",
        lambda: engine.metadata(found.session).get("complete"),
        engine.SETTLED_SECONDS,
    )
    return replace(found, log=server.log.read_text(errors="replace"))


def load(port: int, part: int) -> None:
    """Prompts of which each second one begins as the one before."""
    for number in range(PROMPTS):
        answer(port, tokens(100 * part + number // 2, SHORTEST + number), OUTPUT)


def pauses(session: Path) -> list[Any]:
    found: list[Any] = engine.metadata(session)["processes"][0]["pauses"]
    return found


def test_commands_say_what_the_engine_did(paused: Paused) -> None:
    assert paused.said["pause"] == "engine 0 is paused\n"
    assert paused.said["resume"] == "engine 0 records\n"
    assert paused.said["pause again"] == ""
    assert paused.said["mark"].endswith("  in the pause\n")


def test_the_session_knows_its_pauses(paused: Paused) -> None:
    (begin, end), (again, never) = pauses(paused.session)
    assert 0 < begin < end < again
    assert never is None
    process = engine.metadata(paused.session)["processes"][0]
    assert (process["problem"], process["mismatches"], process["lost"]) == (None, 0, {})


def test_nothing_is_recorded_in_a_pause(paused: Paused) -> None:
    # The process goes on saying what recording cost.
    assert paused.grown_bytes < 2_000
    (begin, end), (again, _) = pauses(paused.session)
    for table in ("scheduler_steps", "kv_cache_allocations", "kv_cache_usage"):
        times = [float(row["timestamp_sec"]) for row in engine.rows(paused.session, table)]
        assert not [time for time in times if begin < time < end or time > again]
        assert [time for time in times if time < begin]
        assert [time for time in times if end < time]


@pytest.mark.parametrize("period", [1, 2])
def test_hits_are_those_that_vllm_counted(paused: Paused, period: int) -> None:
    before, after = (0.0, paused.hits[0]) if period == 1 else paused.hits[1:]
    found = summary(paused.session, period)["prefix_cache"]["true"]["hit_tokens"]
    assert found == after - before > 0


def test_requests_are_those_of_the_periods(paused: Paused) -> None:
    """And none of the request that ran when the recording paused, or went on."""
    (begin, end), _ = pauses(paused.session)
    rows = engine.requests(paused.session)
    lengths = Counter(
        (row["timestamp"] / 1e3 > end, row["input_length"])
        for row in rows
        if row["input_length"] >= SHORTEST
    )
    assert lengths == {(late, SHORTEST + n): 1 for late in (False, True) for n in range(PROMPTS)}
    for row in rows:
        assert row["timestamp"] / 1e3 > end or row["finish_sec"] < begin
    for period in (1, 2):
        found = summary(paused.session, period)
        since, until = (0.0, begin) if period == 1 else (end, float("inf"))
        inside = [row for row in rows if since <= row["timestamp"] / 1e3 < until]
        assert found["requests"]["ended"] == len(inside)
        assert found["warnings"] == []


def test_vllm_s_counters_have_what_the_pause_lacks(paused: Paused, tmp_path: Path) -> None:
    page = tmp_path / "metrics.txt"
    page.write_text(paused.said["page"])
    os.utime(page, (float(paused.said["page at"]),) * 2)
    # What streamed at the page's moment may have had other tokens by then.
    command = ("reconcile", "--metrics-file", str(page), str(paused.session))
    found = profilemate(*command, codes=(0, 1))
    said = " ".join(found.split())
    assert "vLLM counts on while the recording is paused" in said
    assert "in a pause of its recording" in said


def test_the_summary_says_which_period_it_is_of(paused: Paused) -> None:
    said = profilemate("summary", "--full", str(paused.session))
    assert "The recording was paused. The figures below are of period 2 of 2" in " ".join(
        said.split()
    )
    assert "in the pause" in said
    running = json.loads(paused.said["summary of running"])
    assert running["session"]["period"]["number"] == 2
    assert running["session"]["begin_sec"] == pauses(paused.session)[0][1]


@cache
def summary(session: Path, period: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        profilemate("summary", "--json", "--period", str(period), str(session))
    )
    return found


def test_check_says_which_period_it_is_of(paused: Paused) -> None:
    said = profilemate("check", str(paused.session), "--fail-if", "preemptions>1000")
    assert "The figures below are of period 2 of 2" in " ".join(said.split())


def test_vllm_said_nothing_more(paused: Paused) -> None:
    assert "profilemate" not in paused.log.replace("profilemate/", "")
