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


WHOSE = """
import sys
import profilemate
print(getattr(profilemate, "whose", None))
import vllm.v1.engine.core
print("vLLM runs", profilemate is sys.modules["profilemate"])
"""


@pytest.mark.parametrize("form", ["profilemate", "profilemate/__init__"])
@pytest.mark.parametrize("place", ["before ours", "after ours", "beside the script"])
def test_a_package_of_the_users_with_our_name(
    user: User, python: str, form: str, place: str
) -> None:
    """It is theirs for their code. We are off, with one line at most, where vLLM is."""
    user.write_vllm(probes=False)
    folder = user.work if place == "beside the script" else user.site / "theirs"
    theirs = folder / f"{form}.py"
    theirs.parent.mkdir(parents=True, exist_ok=True)
    theirs.write_text("whose = 'mine'\n")
    script = user.work / "script.py"
    script.write_text(WHOSE)
    path = [ROOT, user.site, folder] if place == "after ours" else [folder, ROOT, user.site]
    path = [each for each in path if each != user.work]
    ended = subprocess.run(
        [python, str(script)],
        env=user.environment({"PYTHONPATH": os.pathsep.join(map(str, path))}),
        capture_output=True,
        check=False,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (0, "mine\nvLLM runs True\n")
    assert all(line.startswith("profilemate: off, ") for line in ended.stderr.splitlines())
    assert ended.stderr.count("\n") <= 1


def test_nothing_of_ours_stays_by_name(user: User, python: str) -> None:
    code = "import sys; print([name for name in sys.modules if name.startswith('profilemate')])"
    assert user.output(code, python=python) == ["[]"]
