# SPDX-License-Identifier: Apache-2.0
"""The user's own sitecustomize runs exactly once, and as if ours were not there."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.bootstrap.conftest import ROOT, User, unindent

RAN = "import sys; print('ran', __name__, sys.modules['sitecustomize'].__file__ == __file__)"
WHO = "import sys; print(sys.modules['sitecustomize'].__file__)"


@pytest.mark.parametrize("form", ["sitecustomize", "sitecustomize/__init__"])
@pytest.mark.parametrize("ours", ["{root}", "{root}/", "{root}:{root}/", "{root}:{link}", "{link}"])
def test_runs_exactly_once(user: User, python: str, form: str, ours: str) -> None:
    link = user.work / "link"
    link.symlink_to(ROOT)
    theirs = user.write(form, RAN)
    path = f"{ours.format(root=ROOT, link=link)}:{user.site}".replace(":", os.pathsep)
    assert user.output(WHO, python=python, PYTHONPATH=path) == [
        "ran sitecustomize True",
        str(theirs),
    ]


@pytest.mark.parametrize("has_own", [True, False])
@pytest.mark.parametrize("copies", [2, 3])
def test_copies_of_profilemate_hand_over_once(
    user: User, python: str, copies: int, has_own: bool
) -> None:
    """As where a parent's PYTHONPATH has one, and a script adds another."""
    roots = [str(ROOT)]
    for number in range(1, copies):
        root = user.work / f"copy{number}"
        root.mkdir()
        shutil.copy(ROOT / "sitecustomize.py", root)
        shutil.copytree(ROOT / "profilemate", root / "profilemate")
        roots.append(str(root))
    if has_own:
        user.write("sitecustomize", RAN)
    finders = "print(sum(type(e).__module__ == 'profilemate.bootstrap' for e in sys.meta_path))"
    for ordered in (roots, roots[::-1]):
        path = os.pathsep.join([*ordered, str(user.site)])
        ended = user.run(f"import sys; {finders}", python=python, PYTHONPATH=path)
        assert ended.stderr == ""
        assert ended.stdout.split("\n") == [*["ran sitecustomize True"] * has_own, "1", ""]


def test_ours_stays_where_there_is_no_other(user: User, python: str) -> None:
    """A Python may come with one of its own, as Debian's does, which runs after ours."""
    (user.site / "sitecustomize").mkdir()  # a folder without an __init__ is none
    whose = "import sys; print(getattr(sys.modules.get('sitecustomize'), '__file__', ''))"
    (own,) = user.output(whose, python=python, PYTHONPATH="")
    assert user.output(WHO, python=python) == [own or str(ROOT / "sitecustomize.py")]


def test_only_the_next_of_several_runs(user: User, python: str) -> None:
    user.write("sitecustomize", "print('first')")
    user.write("later/sitecustomize", "print('second')")
    path = os.pathsep.join(map(str, (ROOT, user.site, user.site / "later")))
    assert user.output("pass", python=python, PYTHONPATH=path) == ["first"]


@pytest.mark.parametrize(
    "raising",
    [
        "raise ValueError('theirs')",
        "import no_such_module",
        "raise ImportError('theirs', name='sitecustomize')",
        "raise SystemExit(3)",
        "raise KeyboardInterrupt",
        "def broken(:",
    ],
)
def test_what_it_raises_is_what_python_sees(user: User, python: str, raising: str) -> None:
    user.write("sitecustomize", raising)
    code = "import sys; print('sitecustomize' in sys.modules)"
    without = user.run(code, python=python, PYTHONPATH=str(user.site))
    with_ours = user.run(code, python=python)
    assert with_ours.returncode == without.returncode
    assert with_ours.stdout == without.stdout
    # A traceback may show our frame besides; its last line, or the only one, is the same.
    assert with_ours.stderr.splitlines()[-1:] == without.stderr.splitlines()[-1:]


HANDS_OVER = """
    import os, sys
    sys.path.remove(os.path.dirname(__file__))
    own = sys.modules.pop("sitecustomize")
    loaded = set(sys.modules)
    try:
        import sitecustomize
    finally:
        sys.modules["sitecustomize"] = own
    # Unload what came in by that, as ddtrace does.
    for name in set(sys.modules) - loaded - {"sitecustomize"}:
        del sys.modules[name]
    print("tracer ran")
    """


@pytest.mark.parametrize("first", ["tracer", "profilemate"])
def test_beside_a_tracer_that_hands_over_and_unloads(user: User, python: str, first: str) -> None:
    user.write_vllm(probes=False)
    user.write("sitecustomize", "print('ran')")
    user.write("tracer/sitecustomize", HANDS_OVER)
    folders = [user.site / "tracer", ROOT]
    path = [*(folders if first == "tracer" else reversed(folders)), user.site]
    code = f"""
        import sys
        sys.path.remove({str(ROOT)!r})
        import vllm
        from profilemate import hooks
        print([type(f).__name__ for f in sys.meta_path].count("Finder"), hooks.status()[0].reason)
        """
    path_value = os.pathsep.join(map(str, path))
    assert user.output(code, python=python, PYTHONPATH=path_value, VLLM_PROFILING="0") == [
        "ran",
        "tracer ran",
        "1 vllm.envs has not been imported",
    ]


def test_two_that_run_their_next_do_not_run_each_other(user: User, python: str) -> None:
    """One that runs what it finds anywhere else on the path, and stays on it."""
    theirs = """
        import os, sys
        from importlib.machinery import PathFinder
        from importlib.util import module_from_spec
        print("theirs")
        here = os.path.dirname(__file__)
        spec = PathFinder.find_spec("sitecustomize", [e for e in sys.path if e != here])
        spec.loader.exec_module(module_from_spec(spec))
        """
    user.write("sitecustomize", theirs)
    path = os.pathsep.join(map(str, (user.site, ROOT)))
    assert user.output("pass", python=python, PYTHONPATH=path) == ["theirs"]


PUTS_ITSELF_FIRST = """
    import os
    here = os.path.dirname(__file__)
    others = [e for e in os.environ["PYTHONPATH"].split(os.pathsep) if e != here]
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *others])
    print("tracer ran", flush=True)
    """


def test_beside_a_tracer_that_hides_all_others_from_the_children(user: User, python: str) -> None:
    """As OpenTelemetry's does: it hands over to no other, and comes first in each child."""
    user.write_vllm(probes=False)
    user.write("tracer/sitecustomize", PUTS_ITSELF_FIRST)
    code = """
        import os, subprocess, sys
        import vllm
        active = [type(finder).__name__ for finder in sys.meta_path].count("Finder")
        print(active, os.environ["PYTHONPATH"].split(os.pathsep)[0], flush=True)
        if sys.argv[-1] != "child":
            subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[1], "child"], check=True)
        """
    path = os.pathsep.join(map(str, (ROOT, user.site / "tracer", user.site)))
    ended = subprocess.run(
        [*user.command(code, python=python), unindent(code)],
        env=user.environment({"PYTHONPATH": path, "VLLM_PROFILING": "0"}),
        capture_output=True,
        check=False,
        text=True,
    )
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == ["tracer ran", f"1 {ROOT}"] * 2
