# SPDX-License-Identifier: Apache-2.0
"""The page of a fleet: a row a replica, with links to the reports."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.analysis.invoke import invoke
from tests.fleet.made import engine, made, started


def page(folder: Path, *options: object) -> str:
    file = folder / "fleet.html"
    done = invoke("fleet", folder, "-o", file, "--jobs", 1, *options)
    assert (done.returncode, done.stdout) == (0, f"{file} is written\n"), done.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    return file.read_text()


def links(content: str) -> list[str]:
    return re.findall(r'<a href="([^"]+)">', content)


def test_a_row_a_replica_that_links_to_its_reports(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        made(tmp_path / "runs 1", name, host="one" if name != "c" else "other", **started(10))
    for name in ("a", "c"):
        (tmp_path / "runs 1" / f"session_{name}" / "report.html").write_text("a report")
    content = page(tmp_path)
    assert len(re.findall(r'<tr><th scope="row">(?:<a[^>]*>)?(?:one|other)', content)) == 2
    assert links(content) == [f"runs%201/session_{name}/report.html" for name in "ac"]


def test_reports_are_written_where_asked(tmp_path: Path) -> None:
    """The last session of a replica comes first."""
    for second, name in ((20, "late"), (10, "early")):
        made(tmp_path / "runs", name, host="one", **started(second))
    content = page(tmp_path, "--reports", tmp_path / "pages")
    assert links(content) == ["pages/session_late.html", "pages/session_early.html"]
    for link in links(content):
        assert "<title>" in (tmp_path / link).read_text()
    assert not list(tmp_path.rglob("report.html"))
    done = invoke("fleet", tmp_path, "--reports", tmp_path / "pages")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_a_report_is_written_into_the_folder_whatever_the_session_is_called(tmp_path: Path) -> None:
    """And no session's takes the place of another's."""
    ids = ("../../up", str(tmp_path / "absolute"), "alike", "alike", ".", "a\0b", "x" * 300)
    for number, session_id in enumerate(ids):
        made(tmp_path / "runs", f"r{number}", session_id=session_id)
    content = page(tmp_path / "runs", "--reports", tmp_path / "deep" / "pages")
    written = {each.name for each in (tmp_path / "deep" / "pages").iterdir()}
    assert len(written) == len(ids)
    assert {link.rpartition("/")[2] for link in links(content)} == written
    assert {each.name for each in tmp_path.rglob("*.html")} == written | {"fleet.html"}
    assert not [*tmp_path.glob("*.html")]


def test_a_link_in_place_of_a_report_is_none(tmp_path: Path) -> None:
    secret = tmp_path / "elsewhere.html"
    secret.write_text("not a session's")
    (made(tmp_path / "runs", "a").folder / "report.html").symlink_to(secret)
    assert links(page(tmp_path / "runs")) == []


def test_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    folder = made(tmp_path, "a").folder
    (folder / "report.html").write_text("a report")
    os.rename(folder, os.fsencode(tmp_path) + b"/javascript:\xff")
    assert links(page(tmp_path)) == ["javascript%3A%FF/report.html"]


def test_what_clients_and_hosts_are_called_stays_text(tmp_path: Path) -> None:
    made(tmp_path, "a", host="<script>alert(1)</script>", model={"name": "<b>m"})
    content = page(tmp_path, "--by", "model", "--gpu-hour", 2)
    assert "<script" not in content
    assert "<b>" not in content
    assert "&lt;script&gt;" in content


def test_what_stands_out_is_marked(tmp_path: Path) -> None:
    for number in range(6):
        hit = 100 if number == 5 else 800 + number
        cache = {"requests": 1, "query_tokens": 1000, "hit_tokens": hit}
        made(tmp_path, f"r{number}", engine(prefix_cache=cache))
    assert re.findall(r'class="odd">([^<]+)', page(tmp_path)) == ["10.00&nbsp;%"]
