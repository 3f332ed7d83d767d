# SPDX-License-Identifier: Apache-2.0
"""``profilemate whatif --ray`` on two nodes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from profilemate.cluster import tasks
from tests.analysis.builder import SessionBuilder
from tests.analysis.invoke import invoke
from tests.cluster.conftest import Nodes
from tests.whatif.test_exact_configuration import SCHEDULER


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """Thirty requests, one a second, that begin alike."""
    built = SessionBuilder(tmp_path / "session")
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
                "finish_reason": "length",
            }
        )
    return built.folder


def test_results_are_those_of_this_machine_though_a_node_is_killed(
    session: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--blocks=1x,6,9", "--max-num-batched-tokens=2048,32", "--step-ms=10", "--json"]
    here = invoke("whatif", session, *options, "--jobs=1")
    assert here.returncode == 0, here.stderr

    second = nodes.add()
    begun = threading.Event()
    run = tasks.run

    def noticed(*arguments: Any, **named: Any) -> Any:
        begun.set()
        return run(*arguments, **named)

    def kill() -> None:
        import ray

        begun.wait()
        while ray.available_resources().get("CPU", 0):
            time.sleep(0.1)
        # Both nodes have a task, which imports vLLM for longer than this.
        time.sleep(1)
        nodes.kill(second)

    monkeypatch.setattr(tasks, "run", noticed)
    killer = threading.Thread(target=kill)
    killer.start()
    there = invoke("whatif", session, *options, f"--ray={nodes.address}")
    killer.join()
    assert there.returncode == 0, there.stderr
    assert json.loads(there.stdout) == json.loads(here.stdout)
    # vLLM refuses steps of fewer tokens than requests: that is no failure of the cluster's.
    assert len(json.loads(there.stdout)["failures"]) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--jobs=2"], "--jobs: with --ray the cluster says how much runs at once"),
        (["--fast"], "--ray: --fast models the cache alone; leave out --fast or --ray"),
    ],
)
def test_options_that_do_not_go_together(session: Path, options: list[str], said: str) -> None:
    done = invoke("whatif", session, "--ray=127.0.0.2:1", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
