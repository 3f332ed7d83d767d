# SPDX-License-Identifier: Apache-2.0
"""``profilemate doctor --ray``, and the runtime environment that it checks, on two nodes."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from profilemate import config
from profilemate.cluster import tasks
from profilemate.commands import doctor_ray
from profilemate.commands.doctor_ray import Seen, judge
from tests.analysis.invoke import invoke
from tests.analysis.test_schemas import check
from tests.cluster import work
from tests.cluster.conftest import Nodes
from tests.support.engine import metadata, requests, sessions, wait_until_settled

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = ROOT / "deploy" / "ray" / "runtime_env.yaml"
WAIT_SEC = 300

GOOD = {
    "host": "gpu-1",
    "python": "3.12.1",
    "executable": "/usr/bin/python3",
    "hooks": True,
    "vllm": "0.32.0",
    "wrapt": True,
    "orjson": True,
    "folder_problem": None,
}
SETTINGS = {"VLLM_PROFILING_DIR": "/profiles"}


def seen(
    address: str = "10.0.0.1",
    *,
    offset: float = 0.0,
    error: float = 0.001,
    settings: dict[str, str] = SETTINGS,
    **changes: Any,
) -> Seen:
    return Seen(address, {**GOOD, **changes}, config.read(settings), offset, error)


@pytest.mark.parametrize(
    ("one", "state", "said"),
    [
        (seen(), "good", ""),
        (seen(hooks=False), "bad", "does not find profilemate"),
        (seen(vllm=None), "bad", "/usr/bin/python3 has no vLLM"),
        (seen(orjson=False), "bad", "/usr/bin/python3 cannot import orjson"),
        (seen(folder_problem="Permission denied"), "bad", "/profiles: Permission denied"),
        (seen(problem="cannot start a Python process"), "bad", "cannot start"),
        (seen(settings={"VLLM_PROFILING": "0"}), "bad", "profiling is off"),
        (seen(settings={"VLLM_PROFILING_KEEP": "much"}), "degraded", "VLLM_PROFILING_KEEP=much"),
        (Seen("10.0.0.1", {}, problem="it does not answer"), "bad", "it does not answer"),
    ],
)
def test_what_is_wrong_with_a_node(one: Seen, state: str, said: str) -> None:
    (node,) = judge([one])
    assert node.state == state
    assert len(node.problems) == bool(said)
    assert said in " ".join(node.problems)


def test_a_node_beside_others() -> None:
    nodes = judge(
        [
            seen("10.0.0.1", offset=0.5),
            seen("10.0.0.2", offset=-1.5),
            # Nobody knows whether this one is more than a second off.
            seen("10.0.0.3", offset=1.5, error=0.6),
            seen("10.0.0.4", vllm="0.31.0"),
        ]
    )
    assert [node.state for node in nodes] == ["good", "degraded", "good", "degraded"]
    assert "its clock is -1.5 s" in nodes[1].problems[0]
    assert nodes[3].problems == ("it has vLLM 0.31.0, and most nodes have 0.32.0",)


@pytest.fixture(scope="module")
def two(nodes: Nodes) -> Iterator[str]:
    """The address of both."""
    second = nodes.add()
    yield nodes.address
    nodes.kill(second)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """That of deploy/, with a folder of this test in the place of what all nodes share."""
    for name in config.NAMES:
        monkeypatch.delenv(name, raising=False)
    found: dict[str, dict[str, str]] = yaml.safe_load(
        ENVIRONMENT.read_text().replace(" /shared/", f" {tmp_path}/shared/")
    )
    assert invoke("inject", found["env_vars"]["PYTHONPATH"]).returncode == 0
    # Nothing is to be found by way of the current folder.
    monkeypatch.chdir("/")
    return found


def asked(address: str) -> tuple[int, list[dict[str, Any]]]:
    done = invoke("doctor", "--ray", address, "--json")
    assert done.stdout, done.stderr
    check("nodes", done.stdout)
    return done.returncode, json.loads(done.stdout)["nodes"]


def test_a_cluster_that_can_record(
    two: str, environment: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (vllm,) = find_spec("vllm").submodule_search_locations
    for name, value in environment["env_vars"].items():
        monkeypatch.setenv(name, value)
    profiles = environment["env_vars"]["VLLM_PROFILING_DIR"]
    code, nodes = asked(two)
    assert code == 0
    assert len(nodes) == 2
    for node in nodes:
        assert (node["state"], node["problems"]) == ("good", [])
        assert (node["has_profilemate"], node["can_write"]) == (True, True)
        assert node["directory"] == profiles
        assert node["python"] == sys.version.split()[0]
        assert f"'{node['vllm'].partition('+')[0]}'" in (Path(vllm) / "_version.py").read_text()
        # One machine has one clock.
        assert abs(node["clock_offset_sec"]) <= node["clock_error_sec"] + 0.001
    assert os.listdir(profiles) == []

    done = invoke("doctor", "--ray", two)
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["node", "Python", "vLLM", "profilemate", "folder", "clock"]
    for row in rows:
        address, state, python, release, *rest = row.split()
        assert (address, state, rest[:2]) == ("127.0.0.2", "good", ["yes", "yes"])
        assert (python, release) == (nodes[0]["python"], nodes[0]["vllm"])
    assert len(rows) == 2


def test_a_clock_that_is_off(
    two: str, environment: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment["env_vars"].items():
        monkeypatch.setenv(name, value)
    # It is this machine's that is five seconds ahead.
    monkeypatch.setattr(doctor_ray, "time", SimpleNamespace(time=lambda: time.time() + 5))
    code, nodes = asked(two)
    assert code == 1
    for node in nodes:
        assert abs(node["clock_offset_sec"] + 5) <= node["clock_error_sec"] + 0.001
        assert node["state"] == "degraded"
        assert node["problems"][0].startswith("its clock is -5.0 s from this machine's")
    # The table says it in seconds, and the lines below it are whole.
    done = invoke("doctor", "--ray", two)
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert all(re.search(r" -(4\.9|5\.0)\d ± \d+\.\d\d s$", line) for line in lines[1:3])
    assert all(nodes[0]["problems"][0] in line for line in lines[3:])


def test_nodes_without_profilemate_without_a_folder_and_one_that_is_gone(
    two: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("VLLM_PROFILING_DIR", str(tmp_path / "file" / "profiles"))
    monkeypatch.chdir("/")
    known = ray.nodes
    # Its name stands for one that left as we looked.
    monkeypatch.setattr(
        ray, "nodes", lambda: [*known(), {**known()[0], "NodeID": "a" * len(known()[0]["NodeID"])}]
    )
    code, (*there, gone) = asked(two)
    assert code == 2
    assert len(there) == 2
    for node in there:
        said = " ".join(node["problems"])
        assert (node["state"], node["has_profilemate"], node["can_write"]) == ("bad", False, False)
        assert "does not find profilemate" in said
        assert f"{tmp_path}/file/profiles: Not a directory" in said
    assert gone["state"] == "bad"
    assert gone["can_write"] is None
    assert gone["problems"][0].startswith("it does not answer")


@pytest.mark.parametrize("address", ["", "127.0.0.1:1", "ray://127.0.0.1:1"])
def test_no_cluster_is_one_line(address: str) -> None:
    done = invoke("doctor", "--ray", address)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("profilemate: --ray")


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    done = invoke("doctor", "--ray", "auto")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"profilemate: {tasks.MISSING}\n"


def test_the_runtime_environment_has_workers_on_both_nodes_record(
    two: str, environment: dict[str, dict[str, str]], model: Path
) -> None:
    """Ray's own worker processes import vLLM and run its scheduler. No hook is attached by hand."""
    injected = environment["env_vars"]["PYTHONPATH"]
    profiles = environment["env_vars"]["VLLM_PROFILING_DIR"]
    with tasks.connected(two, environment):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        places = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        assert len(places) == 2
        running = [
            ray.remote(work.recorded)
            .options(scheduling_strategy=NodeAffinitySchedulingStrategy(place, soft=False))
            .remote(str(ROOT), str(model), seed)
            for seed, place in enumerate(places)
        ]
        found = ray.get(running, timeout=WAIT_SEC)
    assert [came for _, came in found] == [[f"{injected}/profilemate/__init__.py", profiles]] * 2
    wait_until_settled(Path(profiles))
    made = sessions(Path(profiles))
    recorders = [one["pid"] for each in made for one in metadata(each)["processes"]]
    assert sorted(recorders) == sorted(pid for pid, _ in found)
    ended = [one for each in made for one in requests(each)]
    assert {one["request_id"]: one["input_length"] for one in ended} == {
        "request-0": 100,
        "request-1": 101,
    }
