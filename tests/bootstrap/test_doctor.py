# SPDX-License-Identifier: Apache-2.0
"""``profilemate doctor`` in environments that lack one thing or another.

The environments have a package in vLLM's place that has its modules and classes by name. The last
test asks about the vLLM that is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from profilemate.hooks.targets import TARGETS, Target, expected, release
from tests.bootstrap.conftest import ROOT, User

DOCTOR = """
    import sys
    from profilemate.cli import main
    sys.argv = ["profilemate", "doctor", "--json"]
    main()
    """


def write_targets(user: User, without: str = "", version: str = "0.32.0") -> None:
    """A vLLM that has every target but one."""
    user.write("vllm/__init__", f"__version__ = {version!r}\n")
    user.write("torch/__init__", "")
    modules: dict[str, dict[str, list[str]]] = {}
    for target in TARGETS:
        methods = modules.setdefault(target.module, {}).setdefault(target.owner, [])
        if target.method != without:
            methods.append(target.method)
    for module, owners in modules.items():
        source = "".join(
            f"class {owner}:\n"
            + "".join(f"    def {method}(self): ...\n" for method in methods or ["other"])
            for owner, methods in owners.items()
        )
        parts = module.split(".")
        for depth in range(2, len(parts)):
            package = user.site.joinpath(*parts[:depth], "__init__.py")
            if not package.exists():
                user.write("/".join([*parts[:depth], "__init__"]), "")
        is_package = module == "torch.cuda"
        user.write("/".join(parts) + ("/__init__" if is_package else ""), source)


def asked(user: User, **changes: str) -> tuple[int, dict[str, dict[str, Any]]]:
    ended = user.run(DOCTOR, **changes)
    assert not ended.stderr, ended.stderr
    found = json.loads(ended.stdout)
    return ended.returncode, {finding["about"]: finding for finding in found}


def of_class(findings: dict[str, dict[str, Any]], owner: str) -> dict[str, Any]:
    (found,) = [value for name, value in findings.items() if name.endswith(f"block_pool.{owner}")]
    return found


def test_all_is_there(vllm_user: User) -> None:
    write_targets(vllm_user)
    code, found = asked(vllm_user)
    assert (code, {finding["state"] for finding in found.values()}) == (0, {"good"})
    assert of_class(found, "BlockPool")["found"].startswith("10 of 10 methods")
    # The user's own sitecustomize has its turn.
    assert str(vllm_user.site / "sitecustomize.py") in found["PYTHONPATH"]["found"]
    # It leaves nothing but the folder that sessions go to.
    assert [path.name for path in vllm_user.temporary.iterdir()] == ["vllm_profiling"]
    assert not list((vllm_user.temporary / "vllm_profiling").iterdir())


@pytest.mark.parametrize(
    ("without", "code", "state", "lost"),
    [
        ("evict_blocks", 1, "degraded", "explicit evictions"),
        ("touch", 1, "degraded", "(lost: kv_cache_usage.csv"),
        ("schedule", 2, "bad", "(lost: everything)"),
    ],
)
def test_a_method_that_is_gone(
    vllm_user: User, without: str, code: int, state: str, lost: str
) -> None:
    write_targets(vllm_user, without)
    got, findings = asked(vllm_user)
    (found,) = [finding for finding in findings.values() if finding["state"] != "good"]
    assert (got, found["state"]) == (code, state)
    assert f"without {without}: " in found["found"]
    assert lost in found["found"]


def test_what_a_release_never_had_is_not_missing(vllm_user: User) -> None:
    write_targets(vllm_user, "unpin_blocks", version="0.29.0")
    code, found = asked(vllm_user)
    assert (code, of_class(found, "BlockPool")["found"]) == (0, "9 of 9 methods")


@pytest.mark.parametrize("version", ["0.8.4", "99.0"])
def test_a_release_that_was_not_checked(vllm_user: User, version: str) -> None:
    write_targets(vllm_user, version=version)
    code, found = asked(vllm_user)
    assert (code, found["vLLM"]["state"]) == (1, "degraded")


def test_a_class_that_a_plugin_replaced(vllm_user: User) -> None:
    write_targets(vllm_user)
    vllm_user.write(
        "vllm/plugins/__init__",
        """
        def load_general_plugins():
            import vllm.v1.core.block_pool as module
            class Elastic(module.BlockPool): ...
            module.BlockPool = Elastic
        """,
    )
    code, found = asked(vllm_user)
    assert code == 0
    assert (
        "of vllm.plugins.load_general_plugins.<locals>.Elastic"
        in of_class(found, "BlockPool")["found"]
    )


def test_no_vllm(vllm_user: User) -> None:
    vllm_user.write("vllm/__init__", "raise ImportError('libcuda is not there')")
    code, found = asked(vllm_user)
    assert (code, found["vLLM"]["state"]) == (2, "bad")
    assert found["vLLM"]["found"].endswith("libcuda is not there")


def test_switched_off(vllm_user: User) -> None:
    write_targets(vllm_user)
    code, found = asked(vllm_user, VLLM_PROFILING="0")
    assert (code, found["Switch"]["state"]) == (2, "bad")


def test_a_folder_that_cannot_be_made(vllm_user: User) -> None:
    write_targets(vllm_user)
    in_the_way = vllm_user.write("in_the_way", "")
    code, found = asked(vllm_user, VLLM_PROFILING_DIR=str(in_the_way / "sessions"))
    assert (code, found["Sessions go to"]["state"]) == (2, "bad")
    assert "VLLM_PROFILING_DIR" in found["Sessions go to"]["advice"]


def test_profilemate_that_is_not_on_the_path(vllm_user: User) -> None:
    write_targets(vllm_user)
    code = f"import sys; sys.path.append({str(ROOT)!r})\n" + DOCTOR.replace("    ", "")
    ended = vllm_user.run(code, PYTHONPATH=str(vllm_user.site))
    (found,) = [f for f in json.loads(ended.stdout) if f["about"] == "PYTHONPATH"]
    assert (ended.returncode, found["state"]) == (2, "bad")
    assert f"export PYTHONPATH={ROOT}" in found["advice"]


def test_releases_are_compared_by_number() -> None:
    assert release("0.9.2") < release("0.10") < release("0.10.2+cpu")
    new: list[Target] = [target for target in TARGETS if target.since]
    assert not set(new) & set(expected("0.8.5"))
    assert set(expected("0.33.0")) == set(expected("")) == set(TARGETS)


def test_the_installed_release(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "profilemate", "doctor"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_PROFILING_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    assert "10 of 10 methods" in ended.stdout
    assert "degraded" not in ended.stdout
