# SPDX-License-Identifier: Apache-2.0
"""``profilemate plan --from``: GPUs for a rate of requests."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis import open_session
from analysis.headroom import deployment
from analysis.headroom.deployment import Deployment
from tests.analysis.builder import METADATA, SessionBuilder
from tests.analysis.invoke import invoke
from tests.headroom.loads import USUAL
from tests.headroom.test_head_room import pool, requests
from tests.headroom.test_truth import PLACES, ROOMY

CONSTANT, TOKEN = 0.01, 0.001


def record(session: SessionBuilder, blocks: int = 40, **other: Any) -> None:
    """Requests of 4 blocks and 11 steps, three a second, on steps of 10 ms and 1 ms a token."""
    pool(session, blocks, **other)
    times = [(number / 3, number / 3 + 0.5) for number in range(12)]
    requests(session, *times, prompt=50, computed=60)
    at, rows = 0.0, []
    for step in range(40):
        decodes = 3 + step % 4
        prompt = 50 * (step % 2)
        rows.append(
            {
                "timestamp_sec": round(at, 6),
                "step": step + 1,
                "running_reqs": 4,
                "waiting_reqs": 0,
                "scheduled_tokens": decodes + prompt,
                "prefill_tokens": prompt,
                "decode_tokens": decodes,
                "scheduled_reqs": 1 + step % 3,
                "finished_reqs": 0,
                "schedule_us": 1,
            }
        )
        at += CONSTANT + TOKEN * (decodes + prompt)
    session.rows("scheduler_steps.csv", *rows)


def sized(session: SessionBuilder, **options: Any) -> Deployment:
    return deployment.measure(open_session(session.folder), **options)


def poisson_over(mean: float, places: int) -> float:
    """The chance of more than so many, added up."""
    return 1 - sum(
        math.exp(-mean + count * math.log(mean) - math.lgamma(count + 1))
        for count in range(places + 1)
    )


def test_the_arithmetic_on_paper(session: SessionBuilder) -> None:
    """A request takes a step of 50 tokens of prompt and 10 of a token of the answer: a running one
    adds 60 / 11 ms to a step, and 11 steps at r requests a second run r x (110 ms + 60 ms x L)."""
    record(session)
    found = sized(session, per_sec=5)
    assert (found.requests, found.gpus, found.pool_blocks) == (12, 1, 40)
    assert (found.fit, found.max_num_seqs, found.places) == (10, 256, 10)
    (size,) = found.sizes
    assert (size.replicas, size.gpus) == (1, 1)
    at_once = 5 * 0.11 / (1 - 5 * 0.06)
    assert size.each.at_once == pytest.approx(at_once, rel=1e-3)
    assert size.each.request_sec == pytest.approx(at_once / 5, rel=1e-3)
    assert size.each.step_sec == pytest.approx(at_once / 5 / 11, rel=1e-3)


def test_a_replica_takes_what_has_places_for_99_percent_of_the_time(
    session: SessionBuilder,
) -> None:
    record(session)
    most = sized(session).most
    assert most.p99_at_once == 10
    assert poisson_over(most.at_once, 10) <= 0.01
    # At a rate that is one in two thousand higher, eleven are there too often.
    busier = most.per_sec * 1.0005
    at_once = busier * 0.11 / (1 - busier * 0.06)
    assert poisson_over(at_once, 10) > 0.01


def test_replicas_are_rounded_up(session: SessionBuilder) -> None:
    record(session)
    most = sized(session).most.per_sec
    for rate, replicas in ((0.99 * most, 1), (1.01 * most, 2), (7.5 * most, 8)):
        (size,) = sized(session, per_sec=rate).sizes
        assert size.replicas == replicas
        assert size.each.per_sec == pytest.approx(rate / replicas)
        assert size.each.p99_at_once <= 10


def test_a_replica_has_the_gpus_of_the_session(session: SessionBuilder) -> None:
    record(session)
    content = json.loads((session.folder / "metadata.json").read_text())
    content["parallel"] = {"tensor": 4, "pipeline": 2, "data": 1}
    (session.folder / "metadata.json").write_text(json.dumps(content))
    found = sized(session, per_sec=100)
    assert found.gpus == 8
    assert found.sizes[0].gpus == 8 * found.sizes[0].replicas


def test_places_are_the_fewer_of_both(session: SessionBuilder) -> None:
    record(session, max_num_seqs=6)
    assert sized(session).places == 6
    assert sized(session, max_num_seqs=9).places == 9
    assert sized(session, max_num_seqs=20).places == 10
    # 80 usable blocks have room for 20 requests of 4 blocks.
    assert sized(session, max_num_seqs=64, pool_blocks=81).places == 20
    assert sized(session).most.per_sec < sized(session, max_num_seqs=9).most.per_sec


def test_steps_that_cannot_keep_up_set_the_limit(session: SessionBuilder) -> None:
    """With room for thousands, 1 / 60 ms a request is what the steps compute."""
    record(session, blocks=4_000)
    most = sized(session, max_num_seqs=2_000).most
    assert 16 < most.per_sec < 1 / 0.06


def test_without_a_rate_it_is_the_sessions_own(session: SessionBuilder) -> None:
    record(session)
    found = sized(session)
    assert found.per_sec == pytest.approx(3)
    assert [size.per_sec for size in found.sizes] == pytest.approx([3, 6, 15, 30])
    # Each request was there for half a second.
    assert found.recorded_at_once == pytest.approx(1.5)
    assert found.planned_at_once == pytest.approx(3 * 0.11 / (1 - 3 * 0.06), rel=1e-3)
    assert any("the session had 1.50" in note for note in found.notes)


def test_the_scheduler_at_the_planned_rate(model: Path, tmp_path: Path, hooks_on: None) -> None:
    """The real scheduler gets the requests of a crowded session at the rate that one replica takes:
    as many are there at once as was planned, and hardly one is preempted."""
    load = replace(USUAL, requests=300)
    roomy = load.run(model, tmp_path / "roomy", ROOMY, PLACES)
    most = deployment.measure(open_session(roomy.session), pool_blocks=601).most
    slower = replace(load, per_sec=most.per_sec)
    truth = slower.run(model, tmp_path / "planned", 601, PLACES)
    again = deployment.measure(open_session(truth.session))
    assert again.recorded_at_once == pytest.approx(most.at_once, rel=0.2)
    assert truth.preemptions <= 0.02 * load.requests


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rate", "5"], "--rate needs --from SESSION"),
        (["--max-num-seqs", "5"], "--max-num-seqs needs --from SESSION"),
        (["--from", "SESSION", "--gpu", "80GiB"], "leave out --gpu"),
        (["--from", "SESSION", "--explain"], "leave out --explain"),
        (["MODEL", "--from", "SESSION"], "leave out MODEL"),
        (["--from", "SESSION", "--max-num-seqs", "0"], "--max-num-seqs is 0; name 1 or more"),
        (
            ["--from", "SESSION", "--num-gpu-blocks-override", "4"],
            "a pool of 4 blocks has no room for one request like the session's",
        ),
    ],
)
def test_what_does_not_go_together(session: SessionBuilder, options: list[str], says: str) -> None:
    record(session)
    given = [str(session.folder) if word == "SESSION" else word for word in options]
    assert says in refused(*given)


@pytest.mark.parametrize("rate", ["0", "-1", "fast", "5/d", "1e400", "inf"])
def test_what_is_no_rate(session: SessionBuilder, rate: str) -> None:
    ended = invoke("plan", "--from", str(session.folder), f"--rate={rate}")
    assert ended.returncode == 2
    assert "is not a rate; write 20, 20/s, 1200/min or 72000/h" in " ".join(ended.stderr.split())


def test_sessions_that_show_too_little(session: SessionBuilder) -> None:
    pool(session, 40)
    assert "no request ended" in refused("--from", session.folder)
    requests(session, (1, 2))
    assert "too few steps follow each other" in refused("--from", session.folder)
    session.metadata(groups=[{"kind": "MambaSpec", "block_size": 16}])
    assert "one KV cache group of full attention" in refused("--from", session.folder)


def refused(*options: object) -> str:
    ended = invoke("plan", *options)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    return ended.stderr


def test_in_words_and_as_json(session: SessionBuilder) -> None:
    record(session)
    ended = invoke("plan", "--from", session.folder, "--rate", "2400/min")
    assert ended.returncode == 0, ended.stderr
    assert max(map(len, ended.stdout.splitlines()[1:])) <= 80
    said = " ".join(ended.stdout.split())
    assert f"requests like those of {METADATA['session_id']} GPUs" in said
    assert (
        "Places 10 10 requests fit into 40 blocks but for 1 % of the time; max_num_seqs 256" in said
    )
    assert "Steps of a request = 1.00 of its prompt + 10.00 of its answer = 11 steps" in said
    content = json.loads(invoke("plan", "--from", session.folder, "--rate", "40", "--json").stdout)
    assert content["deployment_version"] == 1
    (size,) = content["sizes"]
    most = content["most"]["per_sec"]
    assert size["per_sec"] == 40
    assert size["replicas"] == math.ceil(40 / most)
    steps = {step["name"]: step["result"] for step in content["steps"]}
    step_us = 1e6 * (CONSTANT + content["most"]["at_once"] * 60 * TOKEN / 11)
    assert steps["A step with the places in use"] == pytest.approx(step_us, rel=1e-3)
    assert steps["A request then"] == pytest.approx(11 * step_us / 1e6, rel=1e-3)
    assert f"= 40.000 / {most:.3f}, rounded up = {size['replicas']} replicas" in said
