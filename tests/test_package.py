# SPDX-License-Identifier: Apache-2.0
"""The wheel and the sdist: built without a network; the wheel installed where nothing else is."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.analysis.builder import SessionBuilder

ROOT = Path(__file__).parent.parent
PACKAGES = ("analysis", "profilemate")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"


def build(kind: str, source: Path, target: Path) -> Path:
    """The one file that building this kind of distribution puts into the folder."""
    target.mkdir()
    run([sys.executable, "-I", "-c", BUILD.format(kind), str(target)], cwd=source)
    (built,) = target.iterdir()
    return built


def run(command: list[str], cwd: Path, status: int = 0) -> str:
    """What the command says."""
    done = subprocess.run(
        command, cwd=cwd, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == status, done.stdout[-3000:]
    return done.stdout


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository: building leaves files in it."""
    copy = tmp_path_factory.mktemp("package") / "source"
    # No file of a user's in the repository, and no test's data of some size.
    ignored = shutil.ignore_patterns(".*", "__pycache__", "data", "images", "build", "*.egg-info")
    return shutil.copytree(ROOT, copy, ignore=ignored)


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return build("wheel", source, source.parent / "wheel")


@pytest.fixture(scope="module")
def python(wheel: Path) -> Path:
    """The interpreter of an environment that has the wheel and no other package, not even pip."""
    folder = wheel.parent.parent / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    interpreter = folder / "bin" / "python"
    pip = [sys.executable, "-I", "-m", "pip", "--python", str(interpreter)]
    run([*pip, "install", "--no-index", "--no-deps", "--quiet", str(wheel)], cwd=folder)
    return interpreter


def site_packages(python: Path) -> Path:
    (found,) = python.parent.parent.glob("lib/python*/site-packages")
    return found


@pytest.fixture
def with_dependencies(python: Path) -> Iterator[Path]:
    """The same environment, which finds the packages of this one behind its own."""
    path = site_packages(python) / "more.pth"
    path.write_text(sysconfig.get_path("purelib") + "\n")
    yield python
    path.unlink()


def test_the_wheel_has_all_of_both_packages_and_nothing_else(source: Path, wheel: Path) -> None:
    expected = {
        path.relative_to(source).as_posix()
        for package in PACKAGES
        for path in (source / package).rglob("*")
        if path.is_file()
    }
    assert {Path(name).suffix for name in expected} == {".py", ".html", ".css", ".js"}
    names = set(contents(wheel))
    metadata = {name for name in names if ".dist-info/" in name}
    (door,) = (name for name in names if name.endswith("/share/profilemate/sitecustomize.py"))
    assert names - metadata - {door} == expected
    assert any(name.endswith("/LICENSE") for name in metadata)


def test_the_sdist_builds_the_same_wheel(source: Path, wheel: Path) -> None:
    sdist = build("sdist", source, source.parent / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(source.parent / "unpacked", filter="data")
    (unpacked,) = (source.parent / "unpacked").iterdir()
    again = build("wheel", unpacked, source.parent / "again")
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)


def test_the_wheel_alone_says_what_it_needs(python: Path, tmp_path: Path) -> None:
    said = run([str(python.with_name("profilemate")), "--help"], tmp_path, status=2)
    # Nothing says where the clone is that it was built from.
    told = "pip install '/path/to/profilemate[analysis]'"
    assert said == f"profilemate: typer is not installed: {told}\n"
    run([str(python), "-I", "-c", "import analysis, profilemate"], tmp_path)


def test_an_installed_wheel_hooks_nothing(python: Path, tmp_path: Path) -> None:
    """It records where the user puts the repository on PYTHONPATH, and nowhere else."""
    loaded = "import sys; print([name for name in sys.modules if 'profilemate' in name])"
    assert run([str(python), "-c", loaded], tmp_path) == "[]\n"
    assert not (site_packages(python) / "sitecustomize.py").exists()


def test_run_and_inject_of_the_installed_wheel(with_dependencies: Path, tmp_path: Path) -> None:
    """A command is profiled as from a clone; and by a folder that has all by itself."""
    profilemate, python = with_dependencies.with_name("profilemate"), str(with_dependencies)
    finds = "import sys; print([type(each).__module__ for each in sys.meta_path][0])"
    said = run([str(profilemate), "run", "--", python, "-c", finds], tmp_path)
    assert said == "profilemate.bootstrap\n"
    said = run([str(profilemate), "run", "--", "sh", "-c", "echo $PYTHONPATH"], tmp_path)
    door = with_dependencies.parents[1] / "share" / "profilemate"
    assert said.strip().split(":")[0] == str(door)

    run([str(profilemate), "inject", "folder"], tmp_path)
    program = f"{finds}; import profilemate, orjson; print(orjson.__file__)"
    run([python, "-m", "venv", "--without-pip", "bare"], tmp_path)
    path = f"PYTHONPATH={tmp_path / 'folder'}"
    said = run(["env", path, str(tmp_path / "bare" / "bin" / "python"), "-c", program], tmp_path)
    first, second = said.splitlines()
    assert first == "profilemate.bootstrap"
    assert Path(second).parent == tmp_path / "folder" / "orjson"


def test_commands_of_the_installed_wheel(with_dependencies: Path, tmp_path: Path) -> None:
    profilemate = str(with_dependencies.with_name("profilemate"))
    assert "summary" in run([profilemate, "--help"], tmp_path)
    where = run([str(with_dependencies), "-I", "-c", "import analysis; print(analysis)"], tmp_path)
    assert str(site_packages(with_dependencies)) in where
    session = SessionBuilder(tmp_path / "session")
    session.usage((0, 50), (5, 0))
    assert "KV cache usage" in run(
        [profilemate, "summary", "--full", str(session.folder)], tmp_path
    )
    run([profilemate, "report", str(session.folder), "-o", "page.html"], tmp_path)
    assert "plotly" in (tmp_path / "page.html").read_text().lower()


def test_the_installed_wheel_brings_the_pytest_plugin(
    with_dependencies: Path, source: Path, tmp_path: Path
) -> None:
    """A real pytest finds the fixture by itself, and runs the example through vLLM's scheduler."""
    folder = source / "examples" / "cache_contract"
    command = [str(with_dependencies), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    assert "3 passed" in run([*command, "-c", "/dev/null", f"--rootdir={folder}"], tmp_path)
