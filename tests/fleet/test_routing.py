# SPDX-License-Identifier: Apache-2.0
"""What replicas had to compute although another one had it, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.analysis.invoke import invoke
from tests.analysis.test_schemas import check
from tests.fleet.replicas import Deployment
from tests.support.scheduler import RequestMaker, tokens

SYSTEM = tokens(0, 64)
"""Four blocks that every prompt begins with."""
ALICE, RARE = tokens(1, 36), tokens(2, 96)
make = RequestMaker(16)


def four_replicas(deployment: Deployment) -> None:
    """Most prompts have 100 tokens: 4 blocks of the system prompt, 2 more, and 4 tokens.

    ======= ==== ==================== ==================================================
    replica at   asks for             which another replica had at that moment
    ======= ==== ==================== ==================================================
    a       0 s  system, Alice
    d       0 s  system, Dave         nothing: a has only just been asked for it
    b       1 s  system, Bob          4 blocks of the system prompt
    b       2 s  system, Bob's next   nothing more: b has the system prompt itself
    c       3 s  system, Alice        6 blocks, the 4 of the system prompt and Alice's 2
    b       4 s  system, Alice        2 blocks behind the 4 that b has
    a       5 s  rare                 nothing
    a       6 s  something large      nothing; it takes all of a's pool, and evicts the rest
    d       7 s  rare                 nothing: a had it and lost it
    c       8 s  rare                 6 blocks, which d has now
    d       9 s  system, Dave's next  nothing more
    a       9 s  a short prompt       nothing
    ======= ==== ==================== ==================================================
    """
    with deployment.replica("a", 12) as (engine, until):
        engine.run(make("a0", SYSTEM + ALICE, 2))
        until(5)
        engine.run(make("a5", RARE + tokens(3, 4), 2))
        until(6)
        engine.run(make("a6", tokens(4, 180), 2))
        until(9)
        engine.run(make("a9", tokens(11, 20), 2))
    with deployment.replica("b", 60) as (engine, until):
        until(1)
        engine.run(make("b1", SYSTEM + tokens(5, 36), 2))
        until(2)
        engine.run(make("b2", SYSTEM + tokens(6, 36), 2))
        until(4)
        engine.run(make("b4", SYSTEM + ALICE, 2))
    with deployment.replica("c", 60) as (engine, until):
        until(3)
        engine.run(make("c3", SYSTEM + ALICE, 2))
        until(8)
        engine.run(make("c8", RARE + tokens(7, 4), 2))
    with deployment.replica("d", 60) as (engine, until):
        engine.run(make("d0", SYSTEM + tokens(8, 36), 2))
        until(7)
        engine.run(make("d7", RARE + tokens(9, 4), 2))
        until(9)
        engine.run(make("d9", SYSTEM + tokens(10, 36), 2))


LOST = {"b": (4 + 2) * 16, "c": (6 + 6) * 16}
ASKED = 10 * 100 + 180 + 20
FOUND = (4 + 4 + 4) * 16
"""By b at 2 s and at 4 s, and by d at 9 s."""


def fleet(folder: Path, *options: str) -> Any:
    done = invoke("fleet", folder, "--json", "--jobs", 1, *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_lost_reuse_equals_a_count_by_hand(deployment: Deployment) -> None:
    four_replicas(deployment)
    routing = fleet(deployment.folder)["routing"]
    lost = {one["replica"]: one["routed_tokens"] for one in routing["replicas"]}
    assert lost == LOST
    assert (routing["joined"], routing["apart"]) == (4, 0)
    assert (routing["query_tokens"], routing["found_tokens"]) == (ASKED, FOUND)
    assert routing["hit_rate"] == pytest.approx(FOUND / ASKED)
    ceiling = (FOUND + sum(LOST.values())) / ASKED
    assert routing["perfect_routing"] == pytest.approx(ceiling)
    # Each content was in one piece wherever it was.
    assert routing["shared_cache"] == pytest.approx(ceiling)


def test_the_json_is_valid_by_its_schema(deployment: Deployment) -> None:
    four_replicas(deployment)
    check("fleet", json.dumps(fleet(deployment.folder, "--gpu-hour", "2")))


def test_contents_of_their_own_are_left_out_and_said(deployment: Deployment) -> None:
    why = "there is no key"
    with deployment.replica("a", 20, secret=None, contents_apart_because=why) as (engine, _):
        engine.run(make("a", SYSTEM + ALICE, 2))
    with deployment.replica("b", 20, secret="another") as (engine, _):
        engine.run(make("b", SYSTEM + ALICE, 2))
    routing = fleet(deployment.folder)["routing"]
    assert (routing["joined"], routing["apart"], routing["hit_rate"]) == (0, 2, None)
    assert routing["because"] == ["there is no key"]
    said = " ".join(invoke("fleet", deployment.folder, "--jobs", 1).stdout.split())
    assert "no two sessions have contents that compare" in said
    assert "Why: there is no key." in said
    assert "there is no key" in said
