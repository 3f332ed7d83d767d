# SPDX-License-Identifier: Apache-2.0
"""The command: where the page goes, and what it says when it cannot."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.analysis.builder import SessionBuilder
from tests.analysis.invoke import invoke
from tests.analysis.journals import running_session
from tests.report.conftest import ROOT, made, run


@pytest.fixture
def used(session: SessionBuilder) -> SessionBuilder:
    session.usage((0, 50), (5, 0))
    return session


def assert_refused(result: subprocess.CompletedProcess[str], says: str) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("profilemate: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


def test_the_page_goes_into_the_session(used: SessionBuilder) -> None:
    before = set(used.folder.iterdir())
    path = made(used.folder)
    assert path == used.folder / "report.html"
    assert set(used.folder.iterdir()) - before == {path}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().startswith("<!DOCTYPE html>")


def test_or_where_it_is_wanted(used: SessionBuilder, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("what was there before")
    assert made(used.folder, "-o", str(path)) == path
    assert "50.00" in path.read_text()
    assert not (used.folder / "report.html").exists()
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_warm_up_is_left_out(used: SessionBuilder) -> None:
    text = made(used.folder, "--after", "5s").read_text()
    assert 'data-key="usage.combined.peak_pct" data-value="0.0"' in text
    assert "Over 5.00 s" in text


def test_a_session_is_as_before_after_its_page(used: SessionBuilder) -> None:
    before = run("summary", str(used.folder), "--json").stdout
    made(used.folder)
    assert run("summary", str(used.folder), "--json").stdout == before


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (".", "it is a folder"),
        ("/", "it is a folder"),
        ("no/where.html", "there is no folder"),
        ("x" * 300, "File name too long"),
        (
            "x" * 240,
            "its name has 240 bytes, and at most 239 can be written; name another file with -o",
        ),
        ("ä" * 120, "its name has 240 bytes"),
    ],
)
def test_what_no_file_can_be(used: SessionBuilder, output: str, says: str) -> None:
    assert_refused(run("report", str(used.folder), "-o", output), says)


def test_the_longest_name(used: SessionBuilder, tmp_path: Path) -> None:
    target = tmp_path / ("x" * 239)
    assert run("report", str(used.folder), "-o", str(target)).returncode == 0
    assert target.is_file()


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_link_leads_to_the_file(used: SessionBuilder, tmp_path: Path, command: str) -> None:
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    target.write_text("what was there before")
    link.symlink_to(target.name)
    assert page(used, command, link).returncode == 0
    assert link.is_symlink()
    assert target.read_text().lower().startswith("<!doctype html>")
    target.unlink()
    assert page(used, command, link).returncode == 0
    assert target.read_text().lower().startswith("<!doctype html>")


@pytest.mark.parametrize("command", ["report", "compare"])
def test_only_a_file_is_replaced(used: SessionBuilder, tmp_path: Path, command: str) -> None:
    pipe, link, loop = tmp_path / "pipe", tmp_path / "link", tmp_path / "loop"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    loop.symlink_to(loop)
    option = "-o" if command == "report" else "--html"
    for path in (pipe, link):
        assert_refused(
            page(used, command, path), "it is a device or a pipe; name another file with"
        )
        assert_refused(page(used, command, path), option)
    assert_refused(page(used, command, loop), "symbolic links")
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert link.is_symlink()


@pytest.mark.parametrize("command", ["report", "compare"])
@pytest.mark.parametrize(
    "name",
    [
        *("kv_cache_usage.csv", "requests.jsonl", "metadata.json", "kv_cache_summary.txt"),
        *("totals.json", "journal"),
    ],
)
def test_a_session_keeps_its_records(used: SessionBuilder, command: str, name: str) -> None:
    before = {path: path.read_bytes() for path in used.folder.iterdir()}
    assert_refused(
        page(used, command, used.folder / name), "the session keeps its own record there"
    )
    assert {path: path.read_bytes() for path in used.folder.iterdir()} == before


def test_a_session_keeps_its_journal(used: SessionBuilder, tmp_path: Path) -> None:
    journal = running_session(tmp_path / "runs") / "journal"
    path = journal / "engine0.journal"
    before = path.read_bytes()
    assert_refused(page(used, "report", path), "the session keeps its own record there")
    assert path.read_bytes() == before


def page(session: SessionBuilder, command: str, path: Path) -> subprocess.CompletedProcess[str]:
    """What came of a page of the session, there."""
    if command == "report":
        return invoke("report", session.folder, "-o", path)
    other = SessionBuilder(session.folder.parent / "other")
    other.metadata()
    return invoke("compare", session.folder, other.folder, "--html", path)


def test_a_folder_without_permission() -> None:
    # Root may write anywhere, so it becomes nobody, who may not read Python's own modules.
    program = (
        "import os, pathlib, sys, analysis.tables.find, profilemate.collector.metadata\n"
        "from profilemate.commands.shared.files import writable\n"
        "from profilemate.commands.shared.errors import errors_in_one_line\n"
        "os.geteuid() or os.setuid(65534)\n"
        "with errors_in_one_line(): writable(pathlib.Path(sys.argv[1], 'report.html'), '-o')"
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        result = subprocess.run(
            [sys.executable, "-c", program, folder],
            check=False,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    # Only the application catches typer's Exit, whose traceback follows here.
    assert result.stderr.startswith(
        f"profilemate: cannot write {folder}/report.html: no permission"
    )
    assert "name another file with -o" in result.stderr.splitlines()[0]


def test_below_a_folder_without_permission(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys, analysis.tables.find, profilemate.collector.metadata\n"
        "from profilemate.commands.shared.files import writable\n"
        "from profilemate.commands.shared.errors import errors_in_one_line\n"
        "os.geteuid() or os.setuid(65534)\n"
        "with errors_in_one_line(): writable(pathlib.Path(sys.argv[1], 'a', 'report.html'), '-o')"
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0)
        result = subprocess.run(
            [sys.executable, "-c", program, folder],
            check=False,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        Path(folder).chmod(0o700)
    assert result.stderr.startswith(
        f"profilemate: cannot write {folder}/a/report.html: Permission denied; name another"
    )


def test_a_place_where_no_file_can_be_made(used: SessionBuilder) -> None:
    assert_refused(run("report", str(used.folder), "-o", "/proc/report.html"), "cannot write /proc")


def test_no_session(tmp_path: Path) -> None:
    assert_refused(run("report", str(tmp_path / "nowhere")), "there is no folder")


def test_a_malformed_table_leaves_no_page(used: SessionBuilder) -> None:
    used.append("kv_cache_usage.csv", "x\n")
    assert_refused(run("report", str(used.folder)), "kv_cache_usage.csv, line 4: 1 fields")
    assert not (used.folder / "report.html").exists()


def test_without_plotly_it_says_what_to_install(used: SessionBuilder) -> None:
    program = (
        "import sys; sys.modules['plotly'] = None; "
        "from profilemate.cli import main; sys.argv[0] = 'profilemate'; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "report", str(used.folder)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert_refused(result, f"plotly is not installed: pip install '{ROOT}[report]'")


def test_help_teaches_in_80_columns() -> None:
    text = run("report", "--help", env={**os.environ, "COLUMNS": "80"}).stdout
    assert "profilemate report ~/runs -o monday.html" in text
    assert "report.html in the" in text
    assert "Exit codes:" in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.isascii()
