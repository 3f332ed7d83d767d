# SPDX-License-Identifier: Apache-2.0
"""A program with several engines leaves a session each: the summary says so, and takes them
together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from analysis.tables.find import siblings
from tests.analysis.builder import METADATA, SessionBuilder
from tests.analysis.invoke import invoke
from tests.analysis.journals import NAME, ended_session

ROOT = Path(__file__).parent.parent.parent
OTHER = "session_20260131_120000_4711_facade"


def beside(base: Path, *names: str) -> list[SessionBuilder]:
    """Sessions with these names in one folder, the first of which holds more than the next."""
    built = []
    for held, name in zip(range(50, 0, -10), names, strict=False):
        session = SessionBuilder(base / name)
        session.metadata(session_id=name, model={**METADATA["model"], "name": f"model of {held}"})
        session.usage((0, held), (5, 0))
        built.append(session)
    return built


def test_siblings_have_one_name_with_numbers(tmp_path: Path) -> None:
    names = [NAME, f"{NAME}_2", f"{NAME}_10"]
    beside(tmp_path, *names)
    beside(tmp_path, OTHER, f"{OTHER}_2")
    (tmp_path / f"{NAME}_3").mkdir()  # holds no session
    (tmp_path / f"{NAME}_4").write_text("")
    for name in names:
        assert [path.name for path in siblings(tmp_path / name)] == names


@pytest.mark.parametrize(
    "name",
    ["session_mine", *(f"{NAME}{end}" for end in ("_1", "_01", "_07", "_1000", "-2")), "copy"],
)
def test_other_names_are_no_siblings(tmp_path: Path, name: str) -> None:
    """A name that profilemate did not make says nothing of who wrote the session."""
    beside(tmp_path, NAME, name)
    assert siblings(tmp_path / name) == [tmp_path / name]
    assert siblings(tmp_path / NAME) == [tmp_path / NAME]


def test_digits_at_the_end_of_a_name_are_no_number(tmp_path: Path) -> None:
    name = "session_20260131_120000_4711_123456"
    beside(tmp_path, name, f"{name}_2")
    assert [path.name for path in siblings(tmp_path / name)] == [name, f"{name}_2"]


def test_siblings_of_a_link_and_of_the_folder_one_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "sessions"
    beside(base, NAME, f"{NAME}_2")
    link = tmp_path / "latest"
    link.symlink_to(base / NAME)
    assert siblings(link) == [link, base / f"{NAME}_2"]
    monkeypatch.chdir(base / NAME)
    assert siblings(Path()) == [Path(), base / f"{NAME}_2"]


def test_a_folder_that_cannot_be_listed_shows_none() -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from analysis.tables.find import siblings\n"
        "os.geteuid() or os.setuid(65534)\n"  # root may list every folder
        "print(len(siblings(Path(sys.argv[1]))))\n"
    )
    with tempfile.TemporaryDirectory() as base:
        beside(Path(base), NAME, f"{NAME}_2")
        counts = []
        for mode in (0o755, 0o311):
            os.chmod(base, mode)
            command = [sys.executable, "-c", script, os.path.join(base, NAME)]
            counts.append(subprocess.check_output(command, cwd=ROOT, text=True))
        os.chmod(base, 0o700)
    assert counts == ["2\n", "1\n"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_another_users_session_is_no_sibling(tmp_path: Path) -> None:
    """In a folder for all users, anybody can make one with this name, or a link to another."""
    beside(tmp_path, NAME, f"{NAME}_2", f"{NAME}_3", OTHER)
    os.chown(tmp_path / f"{NAME}_2", 65534, -1)
    link = tmp_path / f"{NAME}_4"
    link.symlink_to(tmp_path / OTHER)
    os.chown(link, 65534, -1, follow_symlinks=False)
    assert [path.name for path in siblings(tmp_path / NAME)] == [NAME, f"{NAME}_3"]


def test_the_summary_names_the_others(tmp_path: Path) -> None:
    beside(tmp_path, NAME, f"{NAME}_2", f"{NAME}_3", OTHER)
    text = " ".join(invoke("summary", tmp_path / NAME).stdout.split())
    assert f"More of this program: {NAME}_2, {NAME}_3 ('profilemate summary --all' shows" in text
    known = json.loads(invoke("summary", tmp_path / NAME, "--json").stdout)
    assert known["session"]["siblings"] == [f"{NAME}_2", f"{NAME}_3"]
    page = tmp_path / "page.html"
    assert invoke("report", tmp_path / NAME, "-o", page).returncode == 0
    assert f"More of this program: {NAME}_2, {NAME}_3" in page.read_text()
    alone = invoke("summary", tmp_path / OTHER)
    assert "More of this program" not in alone.stdout


def test_all_takes_them_together(tmp_path: Path) -> None:
    beside(tmp_path, NAME, f"{NAME}_2")
    shown = invoke("summary", tmp_path / f"{NAME}_2", "--all")
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert max(len(line) for line in lines if not line.startswith(str(tmp_path))) <= 80
    head = next(number for number, line in enumerate(lines) if "peak usage" in line)
    rows = [line.split() for line in lines[head + 1 : head + 3]]
    assert [(row[0], row[-2]) for row in rows] == [("1", "50.00"), ("2", "40.00")]
    for name in (NAME, f"{NAME}_2"):
        assert f"profilemate  {name}" in lines, "each has its summary"
    assert "More of this program" not in shown.stdout

    known = json.loads(invoke("summary", tmp_path / NAME, "--all", "--json").stdout)
    assert known["siblings_version"] == 1
    assert [one["session_id"] for one in known["sessions"]] == [NAME, f"{NAME}_2"]
    assert [one["peak_pct"] for one in known["sessions"]] == [50, 40]
    single = json.loads(invoke("summary", tmp_path / NAME, "--json").stdout)
    assert known["summaries"][0] == {k: v for k, v in single.items() if k != "summary_version"}


def test_all_of_a_program_with_one_engine(tmp_path: Path) -> None:
    beside(tmp_path, NAME)
    assert "1 session of a program" in invoke("summary", tmp_path / NAME, "--all").stdout


def test_a_killed_sibling_is_completed(tmp_path: Path) -> None:
    folder = ended_session(tmp_path)
    folder.rename(tmp_path / f"{NAME}_2")
    beside(tmp_path, NAME)
    known = json.loads(invoke("summary", tmp_path / NAME, "--all", "--json").stdout)
    assert [one["state"] for one in known["sessions"]] == ["complete", "complete"]


def test_a_damaged_sibling_is_one_line(tmp_path: Path) -> None:
    beside(tmp_path, NAME, f"{NAME}_2")
    (tmp_path / f"{NAME}_2" / "metadata.json").write_text("{")
    shown = invoke("summary", tmp_path / NAME, "--all")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.count("\n") == 1
    assert f"{NAME}_2/metadata.json" in shown.stderr
