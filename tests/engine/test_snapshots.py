# SPDX-License-Identifier: Apache-2.0
"""A server whose collector takes snapshots: of a full pool, at a signal, of a crashed engine."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import open_session
from tests.support import engine
from tests.support.engine import START_SECONDS, Answer, Lab, answer
from tests.support.scheduler import tokens

pytestmark = pytest.mark.engine

PROMPT = 1_300
"""Tokens: a third of the pool's blocks."""
LONG = 700
VARIABLES = {
    "VLLM_PROFILING_SNAPSHOT_WHEN": "usage>30%/1s or crash",
    "VLLM_PROFILING_SNAPSHOT_LIMIT": "2,0s",
    "VLLM_PROFILING_SNAPSHOT_LAST": "1s",
}


@dataclass(frozen=True)
class Served:
    """The session of a server whose engine was killed, and what its metadata.json said of
    snapshots before that."""

    session: Path
    before: dict[str, Any]


@pytest.fixture(scope="module")
def served(lab: Lab) -> Iterator[Served]:
    with lab.server("snapshots", **VARIABLES) as server:
        server.wait_until_ready(START_SECONDS)
        session = engine.session_of(server, lab.sessions("snapshots"))
        (engine_pid,) = engine.wait_for_engines(session, 1).values()
        answer(server.port, tokens(1, 100), 5)
        with lab.slow_answers() as slow:
            long = Answer(server.port, tokens(2, PROMPT), LONG, **slow).read(3)
            engine.wait_for("a full pool", lambda: taken(session), engine.SETTLED_SECONDS)
        long.read().close()
        os.kill(engine.collector_pid(session), signal.SIGUSR2)
        engine.wait_for(
            "what was asked for", lambda: len(taken(session)) == 2, engine.SETTLED_SECONDS
        )
        before = engine.metadata(session)["snapshots"]
        answer(server.port, tokens(3, 100), 5)
        engine.kill(engine_pid)
        server.process.wait(engine.END_SECONDS)
        engine.wait_until_settled(lab.sessions("snapshots"))
        yield Served(session, before)


def taken(session: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (engine.metadata(session).get("snapshots") or {}).get("taken", [])
    return found


def test_reasons(served: Served) -> None:
    full, asked, crash = (each["reason"] for each in taken(served.session))
    assert re.fullmatch(r"usage>30%/1s: at least \d\d\.\d\d % on engine 0", full)
    assert (asked, crash) == ("SIGUSR2", "crash: engine 0 is gone")
    log = engine.metadata(served.session)["snapshots"]
    assert (log["left_out"], log["failed"]) == (0, 0)
    assert served.before["taken"] == log["taken"][:2]


def test_each_is_a_session(served: Served) -> None:
    for each in taken(served.session):
        opened = open_session(served.session.with_name(each["name"]))
        assert opened.state == "complete"
        assert opened.note is not None
        assert opened.note.endswith(f"({each['reason']})")
        assert opened.end_sec <= each["at_sec"]


def test_the_pool_was_as_full_as_it_says(served: Served) -> None:
    """For the whole second before some moment in it, and not before."""
    first = taken(served.session)[0]
    at_least = float(re.findall(r"[\d.]+ %", first["reason"])[0].removesuffix(" %"))
    opened = open_session(served.session.with_name(first["name"]))
    usage = opened.scan("kv_cache_usage").collect().sort("timestamp_sec")
    rows = list(zip(usage["timestamp_sec"], usage["num_blocks"], strict=True))
    total = usage["total_blocks"][0]

    def least(end: int) -> float:
        before = [held for time, held in rows if time <= end - 1][-1:] or [0]
        return min(before + [held for time, held in rows if end - 1 < time <= end]) / total

    fires = [end for end in range(2, int(first["at_sec"]) + 1) if least(end) >= 0.3]
    assert len(fires) == 1, "it was taken at once"
    assert f"{100 * least(fires[0]):.2f}" == f"{at_least:.2f}"


def test_the_crash_is_the_end_of_the_session(served: Served) -> None:
    last = served.session.with_name(taken(served.session)[-1]["name"])
    # Of steps that schedule nothing, a row comes a second later.
    steps, of_session = (
        open_session(each)
        .scan("scheduler_steps")
        .filter(pl.col("scheduled_tokens") > 0)
        .collect()["step"]
        for each in (last, served.session)
    )
    assert steps.max() == of_session.max()
    # It has a second at least, and not the whole.
    assert 1 == of_session.min() < steps.min()
