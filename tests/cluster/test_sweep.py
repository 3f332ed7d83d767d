# SPDX-License-Identifier: Apache-2.0
"""``profilemate sweep --ray`` on nodes that say that they have a GPU."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from analysis import open_session
from tests.analysis.invoke import invoke
from tests.cluster.conftest import Nodes
from tests.sweep.conftest import FAKE

SLOWLY = """
echo "GPUs: $CUDA_VISIBLE_DEVICES, recorder: $PYTHONPATH"
touch "$1/$$"
shift
sleep 3
exec "$@"
"""
"""Says what it has, notes in a folder that it began, and becomes the stand-in for vLLM."""


def sweep(lab: Path, *options: str, ends: str = "well") -> Any:
    marks = lab.with_name("marks")
    marks.mkdir(exist_ok=True)
    command = ["sh", "-c", SLOWLY, "sh", str(marks), sys.executable, str(FAKE), "--ends", ends]
    return invoke("sweep", "-o", lab, "--set", "max-num-seqs=1,4", *options, "--", *command)


def results(lab: Path) -> dict[str, dict[str, Any]]:
    """Every run's result, without what differs from run to run."""
    differs = ("seconds", "others_cores", "cores")
    found = {}
    for path in sorted(lab.glob("*/result.json")):
        result = {k: v for k, v in json.loads(path.read_text()).items() if k not in differs}
        result.get("figures", {}).pop("host_memory_bytes", None)
        found[path.parent.name] = result
    return found


def test_results_are_those_of_this_machine_though_a_node_is_killed(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray's processes could find this profilemate in the current folder.
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "here"
    assert sweep(here, "--repeat=2").returncode == 0

    first, _ = nodes.add(num_gpus=1), nodes.add(num_gpus=1)
    marks = tmp_path / "marks"
    before = len(list(marks.iterdir()))

    def kill() -> None:
        """Once a run is on each node."""
        while len(list(marks.iterdir())) < before + 2:
            time.sleep(0.05)
        nodes.kill(first)

    killer = threading.Thread(target=kill)
    killer.start()
    there = tmp_path / "there"
    done = sweep(there, "--repeat=2", f"--ray={nodes.address}", "--gpus-per-run=1")
    killer.join()
    assert done.returncode == 0, done.stderr
    found = results(there)
    assert len(found) == 4
    # What had begun there was begun again.
    assert len(list(marks.iterdir())) == before + 5
    assert found == results(here)
    for name, result in found.items():
        # The session came along, and so did what the command wrote.
        session = open_session(there / name / "sessions" / result["session"])
        assert session.collect("requests", lambda table: table).height == 4
        log = (there / name / "log.txt").read_text()
        assert log.startswith("GPUs: 0, recorder: ")
        recorder = Path(log.splitlines()[0].partition("recorder: ")[2].partition(":")[0])
        assert (recorder / "sitecustomize.py").is_file()
        assert (recorder / "profilemate" / "bootstrap.py").is_file()
    # Nothing is left to do, so nothing is asked of a cluster.
    again = sweep(there, "--repeat=2", "--ray=127.0.0.2:1")
    assert again.returncode == 0, again.stderr


def test_a_failing_run_is_named(nodes: Nodes, tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    done = sweep(lab, f"--ray={nodes.address}", "--gpus-per-run=0", ends="badly")
    assert done.returncode == 1
    assert {result["why"] for result in results(lab).values()} == {
        "exit code 3: ValueError: --max-num-seqs is more than there is room for"
    }


def test_gpus_are_of_a_cluster(tmp_path: Path) -> None:
    done = sweep(tmp_path / "lab", "--gpus-per-run=2")
    assert done.returncode == 2
    assert "--gpus-per-run says what a run takes of a cluster; give --ray, too" in done.stderr
