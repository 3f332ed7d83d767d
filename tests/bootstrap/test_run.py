# SPDX-License-Identifier: Apache-2.0
"""``profilemate run`` and ``profilemate inject``: a command gets profilemate, and nothing else
changes for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from profilemate import config, door
from profilemate.commands import inject_folder
from tests.analysis.invoke import invoke
from tests.bootstrap.conftest import ROOT, User
from tests.bootstrap.test_activation import ALL_ATTACHED, IMPORT

CALL = [sys.executable, "-m", "profilemate"]


def run(user: User, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """``profilemate run`` as a user whose PYTHONPATH has the clone's packages, not its door."""
    return subprocess.run(
        [*CALL, "run", *arguments],
        env={**user.environment(changes), "PYTHONPATH": str(user.site)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_is_recorded(vllm_user: User) -> None:
    done = run(vllm_user, "--", sys.executable, "-c", IMPORT)
    assert (done.returncode, done.stdout) == (0, f"{ALL_ATTACHED}\n")


def test_a_script_and_its_own_options(vllm_user: User, tmp_path: Path) -> None:
    script = tmp_path / "serve"
    script.write_text(f"#!{sys.executable}\nimport sys\nprint(sys.argv[1:])\n{IMPORT}")
    script.chmod(0o755)
    done = run(vllm_user, str(script), "--keep", "--", "x", PATH=os.environ["PATH"])
    assert done.stdout == f"['--keep', '--', 'x']\n{ALL_ATTACHED}\n"


def test_it_is_the_command(vllm_user: User) -> None:
    """The same process: so signals, exit codes and what inherits them are the command's own."""
    program = "import os; print(os.getpid(), flush=True)"
    with subprocess.Popen(
        [*CALL, "run", "--", sys.executable, "-c", f"{program}; os._exit(7)"],
        env=vllm_user.environment({}),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        said, _ = process.communicate(timeout=60)
    assert said.strip() == str(process.pid)
    assert process.returncode == 7
    asked = ["grep", "SigIgn", "/proc/self/status"]
    alone = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert run(vllm_user, "--", *asked).stdout == alone.stdout


def test_options_are_variables(vllm_user: User) -> None:
    program = "import os, json; print(json.dumps(dict(os.environ)))"
    done = run(
        vllm_user,
        *("--dir", "runs", "--keep", "5GB,6h", "--metrics", "127.0.0.1:9400", "--gpu-timing"),
        *("--snapshot-when", "preemptions>20/1m or crash", "--", sys.executable, "-c", program),
        VLLM_PROFILING_SESSION="another",
        VLLM_PROFILING_VERBOSE="0",
    )
    found = json.loads(done.stdout)
    assert {name: value for name, value in found.items() if name in config.NAMES} == {
        "VLLM_PROFILING_DIR": str(ROOT / "runs"),
        "VLLM_PROFILING_KEEP": "5GB,6h",
        "VLLM_PROFILING_METRICS": "127.0.0.1:9400",
        "VLLM_PROFILING_GPU_TIMING": "1",
        "VLLM_PROFILING_SNAPSHOT_WHEN": "preemptions>20/1m or crash",
        "VLLM_PROFILING_VERBOSE": "0",
    }
    assert found["PYTHONPATH"] == f"{ROOT}{os.pathsep}{vllm_user.site}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--keep", "much", "--", "true"), "VLLM_PROFILING_KEEP=much is not understood (a size"),
        (("--metrics", "here", "--", "true"), "VLLM_PROFILING_METRICS=here is not understood"),
        (("--snapshot-when", "x", "--", "true"), "VLLM_PROFILING_SNAPSHOT_WHEN=x is not"),
        (("--dir", "/etc/hostname", "--", "true"), "cannot write sessions to /etc/hostname: Not a"),
        (("--dir", "/proc/x", "--", "true"), "cannot write sessions to /proc/x: "),
        (("--", "no-such-command-at-all"), "there is no command 'no-such-command-at-all'"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], says: str) -> None:
    done = invoke("run", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"profilemate: {says}")
    assert done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has no package."""
    folder = tmp_path_factory.mktemp("bare") / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def test_a_python_that_lacks_a_package_is_named(vllm_user: User, bare: Path) -> None:
    script = vllm_user.work / "serve"
    script.write_text(f"#!{bare}\nprint('started')\n")
    script.chmod(0o755)
    for command in (str(bare), str(script)):
        done = run(vllm_user, "--", command)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{bare}, which runs {command}, cannot load profilemate" in done.stderr
        assert "No module named 'wrapt'" in done.stderr


def test_what_is_no_python_is_started(vllm_user: User) -> None:
    assert run(vllm_user, "--", "sh", "-c", "echo $VLLM_PROFILING_KEEP").stdout == "\n"


@pytest.fixture(scope="module")
def injected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("injected") / "profilemate"
    mask = os.umask(0o077)
    try:
        done = invoke("inject", folder)
    finally:
        os.umask(mask)
    assert done.returncode == 0, done.stderr
    assert f"export PYTHONPATH={folder}:$PYTHONPATH" in done.stdout
    return folder


def test_an_injected_folder_is_complete(vllm_user: User, injected: Path, bare: Path) -> None:
    path = f"{injected}{os.pathsep}{vllm_user.site}"
    done = vllm_user.run(IMPORT, python=str(bare), PYTHONPATH=path)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{ALL_ATTACHED}\n")
    loaded = "import profilemate.record.recorder, orjson, wrapt; print(orjson.__file__)"
    said = vllm_user.run(f"import sys; {loaded}", python=str(bare), PYTHONPATH=path)
    assert Path(said.stdout.strip()).parent == injected / "orjson", said.stderr


def test_a_users_own_packages_come_first(vllm_user: User, injected: Path, bare: Path) -> None:
    vllm_user.write("wrapt", "whose = 'the user'")
    (vllm_user.site / "wrapt.py").rename(vllm_user.work / "wrapt.py")
    said = vllm_user.run(
        "import wrapt; print(wrapt.whose)", python=str(bare), PYTHONPATH=str(injected)
    )
    assert said.stdout == "the user\n"


def test_everybody_can_read_it(injected: Path) -> None:
    for path in injected.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path
    assert injected.stat().st_mode & 0o055 == 0o055
    names = {path.name for path in injected.rglob("*.dist-info/*")}
    assert "METADATA" in names
    assert not names & {"RECORD", "direct_url.json", "INSTALLER"}
    assert [*injected.rglob("LICENSE*")]


def test_it_can_be_made_again(injected: Path, tmp_path: Path) -> None:
    """Also where the first try ended early, as an init container's may."""
    folder = shutil.copytree(injected, tmp_path / "again")
    (folder / "sitecustomize.py").unlink()
    shutil.rmtree(folder / "orjson")
    (folder / ".new-abc").mkdir()
    (folder / "profilemate" / "old.py").touch()
    inject_folder.fill(folder)
    files = {path.relative_to(folder) for path in folder.rglob("*.py")}
    assert files == {path.relative_to(injected) for path in injected.rglob("*.py")}


def test_another_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    done = invoke("inject", tmp_path)
    assert (done.returncode, [*tmp_path.iterdir()]) == (2, [tmp_path / "mine.txt"])
    assert "has other files in it; name a new folder" in done.stderr
    done = invoke("inject", tmp_path / "mine.txt")
    assert done.returncode == 2
    assert done.stderr == f"profilemate: cannot fill {tmp_path / 'mine.txt'}: Not a directory\n"


def test_a_folder_made_for_another_python(vllm_user: User, injected: Path, bare: Path) -> None:
    folder = shutil.copytree(injected, vllm_user.work / "other")
    for compiled in folder.glob("orjson/*.so"):
        compiled.unlink()
    path = f"{folder}{os.pathsep}{vllm_user.site}"
    done = vllm_user.run(IMPORT, python=str(bare), PYTHONPATH=path)
    assert done.returncode == 0
    assert done.stdout.startswith("[0, 0, 0]")
    assert done.stderr.count("\n") == 1
    assert "orjson cannot be loaded by" in done.stderr
    assert "as if made for another Python" in done.stderr


def test_the_door_of_a_clone() -> None:
    assert door.folder() == str(ROOT)
    assert door.pythonpath(f"/a:{ROOT}::/b") == f"{ROOT}:/a:/b"
    assert door.pythonpath(None) == str(ROOT)
