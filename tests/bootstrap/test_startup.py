# SPDX-License-Identifier: Apache-2.0
"""What a Python process that never imports vLLM notices: nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.bootstrap.conftest import ROOT, User

OURS = {"sitecustomize", "profilemate", "profilemate.bootstrap"}

FINDERS = "[f for f in sys.meta_path if type(f).__module__ == 'profilemate.bootstrap']"


def imported(user: User, python: str, **changes: str) -> set[str]:
    ended = user.run("pass", "-X", "importtime", python=python, **changes)
    assert ended.returncode == 0
    lines = [line for line in ended.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines[1:]}


def test_nothing_but_itself_is_imported(user: User, python: str) -> None:
    without = imported(user, python, PYTHONPATH=str(user.site))
    assert "site" in without
    assert imported(user, python) == without | OURS


def test_nothing_is_said_and_no_file_is_left(user: User, python: str) -> None:
    assert user.output(f"import sys; print(len({FINDERS}))", python=python) == ["1"]
    assert not [*user.work.iterdir(), *user.temporary.iterdir()]


@pytest.mark.parametrize("flag", ["-S", "-I", "-E"])
def test_flags_that_ask_for_a_bare_interpreter(user: User, python: str, flag: str) -> None:
    code = f"import sys; print(len({FINDERS}), 'profilemate' in sys.modules)"
    assert user.output(code, flag, python=python) == ["0 False"]


def spellings(link: Path) -> dict[str, tuple[str, Path | None]]:
    """PYTHONPATH, and the working folder in which it means the repository."""
    return {
        "plain": (str(ROOT), None),
        "trailing slash": (f"{ROOT}/", None),
        "twice": (f"{ROOT}{os.pathsep}{ROOT}/", None),
        "empty entry": (os.pathsep, ROOT),
        "dot": (".", ROOT),
        "relative": (f"../{ROOT.name}", ROOT),
        "symlink": (str(link), None),
        "both": (f"{ROOT}{os.pathsep}{link}", None),
    }


@pytest.mark.parametrize("spelling", spellings(Path()))
def test_repository_under_any_spelling(user: User, python: str, spelling: str) -> None:
    link = user.work / "link"
    link.symlink_to(ROOT)
    path, cwd = spellings(link)[spelling]
    # -c puts the working folder on the path by itself.
    code = f"""
        import os, sys
        path = [os.path.realpath(entry) for entry in sys.path if entry]
        ours = [entry == {str(ROOT)!r} for entry in path]
        print(len({FINDERS}), any(ours), ours == sorted(ours))
        """
    ended = user.run(code, python=python, cwd=cwd, PYTHONPATH=f"{path}{os.pathsep}{user.site}")
    assert (ended.stdout, ended.stderr) == ("1 True True\n", "")


def test_packages_of_the_users_are_not_shadowed(user: User, python: str) -> None:
    for name in ("analysis", "tests", "benchmarks", "demo"):
        user.write(f"{name}/__init__", "whose = 'mine'")
    code = """
        import analysis, tests, benchmarks, demo
        print({m.whose for m in (analysis, tests, benchmarks, demo)})
        """
    assert user.output(code, python=python) == ["{'mine'}"]


def test_analysis_can_still_be_run_from_anywhere(user: User) -> None:
    code = "import importlib.util as u; print(u.find_spec('profilemate').origin)"
    assert user.output(code) == [str(ROOT / "profilemate" / "__init__.py")]


def test_second_install_changes_nothing(user: User, python: str) -> None:
    code = f"""
        import sys
        from profilemate import bootstrap
        before = list(sys.path), list(sys.meta_path)
        bootstrap.install()
        for name in [name for name in sys.modules if name.startswith("profilemate")]:
            del sys.modules[name]
        from profilemate import bootstrap as second_copy
        second_copy.install()
        print(second_copy is not bootstrap, before == (sys.path, sys.meta_path), len({FINDERS}))
        """
    assert user.output(code, python=python) == ["True True 1"]


def test_working_folder_that_is_gone(user: User, python: str) -> None:
    code = f"import sys; print(len({FINDERS}))"
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    ended = subprocess.run(
        ["sh", "-c", script, "sh", *user.command(code, python=python)],
        env=user.environment({}),
        cwd=user.work,
        capture_output=True,
        check=False,
        text=True,
    )
    assert (ended.stdout, ended.stderr) == ("1\n", "")


def test_broken_copy_is_silent_unless_asked(user: User, python: str) -> None:
    copy = user.work / "copy"
    copy.mkdir()
    (copy / "sitecustomize.py").write_bytes((ROOT / "sitecustomize.py").read_bytes())
    user.write("sitecustomize", "print('ran')")
    path = f"{copy}{os.pathsep}{user.site}"
    assert user.output("pass", python=python, PYTHONPATH=path) == ["ran"]
    ended = user.run("pass", python=python, PYTHONPATH=path, VLLM_PROFILING_VERBOSE="1")
    assert ended.stdout == "ran\n"
    assert ended.stderr.startswith("profilemate: off, it cannot start: ModuleNotFoundError")
    assert ended.stderr.count("\n") == 1
