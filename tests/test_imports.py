# SPDX-License-Identifier: Apache-2.0
"""Who imports what, as ``[tool.importlinter]`` in pyproject.toml rules it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest
from importlinter.api import read_configuration

ROOT = Path(__file__).parents[1]
BESIDE_VLLM = {"wrapt", "orjson", "vllm"}
"""All that is there for sure where vLLM is recorded."""


def lint(folder: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    """What import-linter says of the packages in this folder."""
    program = str(Path(sys.executable).with_name("lint-imports"))
    chosen = [f"--contract={contract}" for contract in contracts]
    return subprocess.run(
        [program, "--no-cache", "--no-logo", *chosen],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def contract(name: str) -> dict[str, list[str]]:
    """A contract of pyproject.toml, by its id."""
    contracts = read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    found: dict[str, list[str]] = next(each for each in contracts if each["id"] == name)
    return found


def test_every_import_keeps_to_the_rules() -> None:
    checked = lint(ROOT)
    assert checked.returncode == 0, checked.stdout
    assert "0 broken" in checked.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for package in ("analysis", "profilemate"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    return folder


@pytest.mark.parametrize(
    ("rule", "file", "line"),
    [
        ("circles", "analysis/stats/quantiles.py", "from analysis.stats import circle"),
        (
            "circles",
            "analysis/stats/quantiles.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import analysis.stats.circle",
        ),
        ("layers", "analysis/tables/find.py", "from analysis.pool import usage"),
        ("layers", "analysis/forgotten.py", ""),
        ("renderers", "analysis/renderers/text/layout.py", "import analysis.renderers.html.page"),
        ("analyzer", "analysis/tables/find.py", "def f():\n    import profilemate.collector"),
        ("analyzer", "analysis/whatif/curve.py", "import profilemate.messages"),
        ("recording", "profilemate/record/launch.py", "from profilemate.collector import follow"),
        ("collecting", "profilemate/collector/lock.py", "import profilemate.record.recorder"),
        ("vllm", "profilemate/hooks/probe.py", "import analysis"),
        ("vllm", "profilemate/collector/tables.py", "import polars"),
        ("vllm", "profilemate/format/files.py", "import profilemate.sweep.settings"),
    ],
)
def test_a_rule_that_is_broken_fails(copy: Path, rule: str, file: str, line: str) -> None:
    path = copy / file
    before = path.read_bytes() if path.exists() else None
    circle = copy / "analysis" / "stats" / "circle.py"
    circle.write_text("import analysis.stats.quantiles\n")
    try:
        with path.open("a") as source:
            source.write(f"\n{line}\n")
        checked = lint(copy, rule)
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)
        circle.unlink()
    assert checked.returncode == 1
    assert "1 broken" in checked.stdout, checked.stdout


def test_a_rule_names_every_package_that_vllm_may_lack() -> None:
    """One that is used somewhere, and is not there where vLLM is recorded."""
    graph = grimp.build_graph(
        "analysis", "profilemate", include_external_packages=True, cache_dir=None
    )
    packages = {name for name in graph.modules if "." not in name}
    others = packages - {"analysis", "profilemate"} - sys.stdlib_module_names - BESIDE_VLLM
    assert others <= {*contract("vllm")["forbidden_modules"]}
