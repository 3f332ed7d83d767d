# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes reads a fleet as local processes do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from profilemate.cluster import tasks
from profilemate.fleet import local, on_ray
from tests.analysis.invoke import invoke
from tests.fleet.made import made
from tests.fleet.readers import PATIENCE_SEC, held_up

ROOT = Path(__file__).parent.parent.parent
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of two nodes on this machine, which nobody else can reach."""
    # As on systems where Ray does not leave the machine: in its processes, and in this one.
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    from ray._private import ray_constants
    from ray.cluster_utils import Cluster

    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
    found = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        found.add_node(**NODE)
        assert found.address.startswith("127.0.0.1:")
        yield found
    finally:
        found.shutdown()


def eight(folder: Path) -> list[str]:
    """Sessions, one of which cannot be read."""
    for number in range(8):
        made(folder, f"s{number}").usage((0, 10 * number))
    (folder / "session_s3" / "totals.json").unlink()
    return sorted(map(str, folder.glob("session_*")))


def test_a_cluster_gives_what_local_processes_give(cluster: Any, tmp_path: Path) -> None:
    eight(tmp_path)
    here = invoke("fleet", tmp_path, "--json", "--jobs", 2)
    there = invoke("fleet", tmp_path, "--json", "--ray", cluster.address)
    assert (there.returncode, there.stdout, there.stderr) == (1, here.stdout, "")
    assert "session_s3 has no totals.json" in here.stdout


def test_a_node_that_is_killed_changes_nothing(cluster: Any, tmp_path: Path) -> None:
    paths = eight(tmp_path)
    victim = next(iter(cluster.worker_nodes))
    (tmp_path / "victim").write_text(victim.node_id)
    reached = tmp_path / "reached"

    def kill() -> None:
        until = time.monotonic() + PATIENCE_SEC
        while not reached.exists() and time.monotonic() < until:
            time.sleep(0.05)
        cluster.remove_node(victim, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    with on_ray.cluster(cluster.address, 1) as connected:
        found = [*connected.read_all(paths, held_up)]
    killer.join()
    assert reached.exists()
    assert found == [*local.read_all(paths, 1)]


def test_without_ray_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path, "a")
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    monkeypatch.setattr(on_ray, "find_spec", lambda name: None)
    for address in ("auto", "local"):
        done = invoke("fleet", tmp_path, "--ray", address)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"profilemate: {tasks.MISSING}\n"


@pytest.mark.parametrize("address", ["", "127.0.0.1:1", "ray://127.0.0.1:1"])
def test_no_cluster_is_one_line(tmp_path: Path, address: str) -> None:
    made(tmp_path, "a")
    done = invoke("fleet", tmp_path, "--ray", address)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("profilemate: --ray")


def test_nothing_imports_ray_that_was_not_asked_to(tmp_path: Path) -> None:
    made(tmp_path, "a")
    program = (
        "import sys\n"
        "from profilemate.commands.app import application\n"
        "from profilemate.fleet import on_ray\n"
        "application(None)(sys.argv[1:], standalone_mode=False)\n"
        "assert 'ray' not in sys.modules\n"
    )
    command = [sys.executable, "-c", program, "fleet", str(tmp_path), "--jobs", "1"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
