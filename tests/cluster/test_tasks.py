# SPDX-License-Identifier: Apache-2.0
"""Tasks on a Ray cluster of two nodes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from analysis.errors import RuleError
from profilemate.cluster import tasks
from profilemate.installing import pip_install
from tests.cluster import work
from tests.cluster.conftest import Nodes

ROOT = Path(__file__).resolve().parent.parent.parent


def test_results_come_in_their_order_and_failures_have_a_reason(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray's processes could find this profilemate in the current folder.
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[int, Any]] = []
    with tasks.connected(nodes.address):
        found = tasks.run(work.times, 3, [1, 2, 3], ended=lambda at, one: seen.append((at, one)))
        some = tasks.run(work.refused, 2, [1, 2, 3])
        made = tasks.run(work.home, None, [0])
    assert found == [3, 6, 9]
    assert sorted(seen) == [(0, 3), (1, 6), (2, 9)]
    assert some == [1, 2, tasks.Failed("ValueError: 3 is more than 2")]
    # The code was sent there.
    assert not made[0].startswith(str(ROOT))


def test_a_process_that_dies_is_tried_again(nodes: Nodes, tmp_path: Path) -> None:
    with tasks.connected(nodes.address):
        assert tasks.run(work.dying, str(tmp_path), [0, 1, 2, 3]) == [0, 1, 2, 3]
        with mock.patch.object(tasks, "TRIES", 2):
            found = tasks.run(work.always_dying, None, [0, 1])
    assert found == [0, tasks.Failed("its process or machine died, 2 times: WorkerCrashedError")]


def test_a_node_that_is_killed_changes_no_result(nodes: Nodes, tmp_path: Path) -> None:
    second = nodes.add()
    with tasks.connected(nodes.address):
        import ray

        own = next(
            node["NodeID"]
            for node in ray.nodes()
            if node["Alive"] and node["NodeID"] != ray.get_runtime_context().get_node_id()
        )

        def kill() -> None:
            """As soon as something runs on the second node."""
            while not any(own in path.read_text() for path in tmp_path.iterdir()):
                time.sleep(0.05)
            nodes.kill(second)

        killer = threading.Thread(target=kill)
        killer.start()
        found = tasks.run(work.slow, str(tmp_path), list(range(6)))
        killer.join()
    assert found == list(range(6))
    # What had begun there was begun again.
    assert sum(len(path.read_text().splitlines()) for path in tmp_path.iterdir()) > 6


@pytest.mark.parametrize(
    ("address", "said"),
    [("", "'' is no address"), ("local", "'local' is no address")],
)
def test_no_address(address: str, said: str) -> None:
    with pytest.raises(RuleError, match=said), tasks.connected(address):
        pass


def test_nothing_imports_ray_and_without_it_one_line_says_what_to_install(tmp_path: Path) -> None:
    program = """
import sys, importlib.abc
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
sys.meta_path.insert(0, Missing())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "ray" else found(name, *more)
from profilemate.cli import main
sys.argv = ["profilemate", *sys.argv[1:]]
main()
"""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1,2]}\n')

    def profilemate(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program, "whatif", str(trace), "--blocks=90", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    assert profilemate("--fast").returncode == 0
    done = profilemate("--ray=127.0.0.2:1")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"--ray needs Ray, which is not installed; {pip_install('ray')}" in line
