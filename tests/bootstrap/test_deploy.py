# SPDX-License-Identifier: Apache-2.0
"""The files in deploy/: valid, and with the variables and paths that profilemate has."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from profilemate import config
from profilemate.commands.inject_folder import MARK
from tests.bootstrap.conftest import ROOT

DEPLOY = ROOT / "deploy"
FILES = sorted(
    path
    for folder in ("compose", "docker", "kubernetes", "ray", "slurm", "systemd")
    for path in (DEPLOY / folder).iterdir()
)


def deployment() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes" / "vllm.yaml").read_text())
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_variables_are_those_that_there_are(path: Path) -> None:
    named = set(re.findall(r"VLLM_PROFILING\w*", path.read_text()))
    assert named <= {*config.NAMES}
    settings = {"VLLM_PROFILING_KEEP": "2GB", "VLLM_PROFILING_METRICS": "0.0.0.0:9400"}
    assert not config.read(settings).problems


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_docs_name_it(path: Path) -> None:
    assert f"{path.relative_to(ROOT)}" in (ROOT / "docs" / "deploying.md").read_text()


def test_the_pod_finds_the_folder_that_is_filled() -> None:
    pod = deployment()["spec"]["template"]["spec"]
    (filling,), (vllm,) = pod["initContainers"], pod["containers"]
    variables = {each["name"]: each["value"] for each in vllm["env"]}
    assert not config.read(variables).problems
    mounts = {each["mountPath"]: each["name"] for each in vllm["volumeMounts"]}
    (filled,) = filling["volumeMounts"]
    assert mounts[variables["PYTHONPATH"]] == filled["name"]
    assert filling["command"][-1] == f"{filled['mountPath']}/"
    assert variables["VLLM_PROFILING_DIR"] in mounts
    assert {*mounts.values()} == {each["name"] for each in pod["volumes"]}


def test_the_manifest_is_valid() -> None:
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    kubernetes.validate(deployment(), kubernetes.latest_version(), strict=True)


def test_vllm_waits_for_the_folder() -> None:
    services = yaml.safe_load((DEPLOY / "compose" / "compose.yml").read_text())["services"]
    vllm, filling = services["vllm"], services["profilemate"]
    assert vllm["depends_on"]["profilemate"]["condition"] == "service_completed_successfully"
    name, _, _ = filling["volumes"][0].partition(":")
    assert f"{name}:{vllm['environment']['PYTHONPATH']}:ro" in vllm["volumes"]


def test_scripts_parse() -> None:
    subprocess.run(["sh", "-n", str(DEPLOY / "slurm" / "vllm.sbatch")], check=True)
    for line in (DEPLOY / "docker" / "vllm.Dockerfile").read_text().splitlines():
        assert line.startswith(("#", "FROM ", "COPY ", "ENV "))


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_the_drop_in_is_valid(tmp_path: Path) -> None:
    (tmp_path / "vllm.service").write_text("[Service]\nExecStart=/bin/true\n")
    dropped = tmp_path / "vllm.service.d"
    dropped.mkdir()
    shutil.copy(DEPLOY / "systemd" / "profilemate.conf", dropped)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "vllm.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not re.search(r"profilemate\.conf", done.stderr), done.stderr
    assert done.returncode == 0, done.stderr


def test_the_mark_is_in_no_package() -> None:
    """It is what tells a folder that 'inject' made from another."""
    assert not (ROOT / MARK).exists()
