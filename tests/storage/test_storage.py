# SPDX-License-Identifier: Apache-2.0
"""Sessions in object storage: sent, found, fetched over a bad line, and read as any other."""

from __future__ import annotations

import http.client
import json
import shutil
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

import pytest

from analysis import SessionError, open_session
from analysis.tables import remote, storage
from analysis.tables.storage import Store
from profilemate.format.urls import is_url, redacted, url_of
from tests.analysis.invoke import invoke
from tests.analysis.test_cli import assert_fails
from tests.analysis.test_segments import differences, said
from tests.pack.sessions import texts
from tests.storage.s3 import SECRET, Front
from tests.support import segments

pytestmark = pytest.mark.usefixtures("front")


def send(folder: Path, url: str) -> None:
    """Put a session's folder there, as any tool would."""
    store = Store(url)
    for path in folder.rglob("*"):
        if path.is_file():
            store.send(path, path.relative_to(folder).as_posix())


def without_note(found: dict[str, object]) -> dict[str, object]:
    session = dict(found["session"])  # type: ignore[call-overload]
    del session["note"]
    return {**found, "session": session}


def assert_same(url: str, folder: Path) -> None:
    fetched = said(url)  # type: ignore[arg-type]
    assert fetched["session"]["note"].startswith("it was fetched from s3://bucket/")
    assert differences(without_note(fetched), without_note(said(folder))) == []


class TestSessions:
    def test_a_folder_as_it_is(self, large: Path, place: str) -> None:
        send(large, f"{place}/{large.name}")
        assert_same(f"{place}/{large.name}", large)

    def test_in_segments(self, large: Path, place: str, tmp_path: Path) -> None:
        folder = shutil.copytree(large, tmp_path / large.name)
        segments.split(folder, segments.by_share(folder, 0.3), segments.by_share(folder, 0.6))
        send(folder, f"{place}/{large.name}")
        assert_same(f"{place}/{large.name}", folder)

    def test_packed_into_the_bucket_and_back(self, large: Path, place: str, tmp_path: Path) -> None:
        result = invoke("pack", large, "-o", f"{place}/kept")
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.splitlines()[-1] == f"{place}/kept"
        assert_same(f"{place}/kept", large)
        assert invoke("unpack", f"{place}/kept", "-o", tmp_path / "back").returncode == 0
        assert texts(tmp_path / "back") == texts(large)

    def test_the_newest_of_a_place_and_of_a_glob(self, large: Path, place: str) -> None:
        names = [f"session_2026020{day}_120000_1_aaaaaa" for day in (1, 3, 2)]
        for name in names:
            send(large, f"{place}/runs/{name}")
        Store(f"{place}/runs").send_bytes(b"x", "no_session/file.txt")
        newest = [f"{place}/runs/{names[at]}" for at in (1, 2, 0)]
        assert remote.sessions_at(f"{place}/runs") == newest
        assert remote.sessions_at(f"{place}/*/session_*_120000_*") == newest
        assert remote.sessions_at(f"{place}/runs/*0202*") == [newest[1]]
        opened = open_session(f"{place}/runs/*")
        assert (opened.url, opened.directory.name) == (newest[0], names[1])

    def test_a_report_goes_to_the_current_folder(
        self, large: Path, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        send(large, f"{place}/{large.name}")
        monkeypatch.chdir(tmp_path)
        for format_ in ("load", "otlp"):
            assert invoke("export", format_, f"{place}/{large.name}").returncode == 0
        made = {each.name for each in tmp_path.iterdir() if each.suffix == ".jsonl"}
        assert made == {"load.timed-trace.jsonl", "spans.otlp.jsonl"}

    def test_nothing_is_left_in_the_temporary_folder(
        self, large: Path, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        send(large, f"{place}/{large.name}")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        opened = open_session(f"{place}/{large.name}")
        assert [*tmp_path.iterdir()] == [opened.directory.parent]
        del opened
        assert [*tmp_path.iterdir()] == []

    def test_after_a_gap_in_its_segments(self, large: Path, place: str, tmp_path: Path) -> None:
        """What came after the gap is read, as a window is, and it is said."""
        folder = shutil.copytree(large, tmp_path / large.name)
        end_sec = open_session(large).end_sec
        segments.cut_at(folder, *(share * end_sec for share in (0.2, 0.4, 0.6)))
        send(folder, place)
        for name in [each.name for each in Store(place).objects()]:
            if name.startswith("segments/0002/"):
                Store(place).remove(name)
        opened = open_session(place)
        assert [each.number for each in opened.files.segments] == [3]
        assert opened.note is not None
        assert "a segment after 0001 is missing there, and what follows is" in opened.note
        found = said(place)  # type: ignore[arg-type]
        assert found["session"]["window"]["removed_segments"] == 2
        segments.remove_before(folder, 3)
        expected = said(folder)
        assert found["evictions"] == expected["evictions"]
        assert found["requests"] == expected["requests"]

    def test_its_url_is_where_it_is(self, large: Path, place: str) -> None:
        send(large, f"{place}/{large.name}")
        found = json.loads(invoke("summary", place, "--json").stdout)
        assert found["session"]["directory"] == f"{place}/{large.name}"
        assert f"{place}/{large.name}\n" in invoke("summary", place).stdout
        result = invoke("compare", f"{place}/{large.name}", place)
        assert_fails(result, f"are the same session: {place}/{large.name}")

    def test_a_table_that_is_missing_there_is_said(self, large: Path, place: str) -> None:
        send(large, place)
        metadata = json.loads((large / "metadata.json").read_text())
        written = sum(path.stat().st_size for path in large.iterdir() if path.suffix != ".json")
        metadata["cost"] = {"table_bytes": written}
        Store(place).send_bytes(json.dumps(metadata).encode(), "metadata.json")
        assert not said(place)["warnings"]  # type: ignore[arg-type]
        Store(place).remove("moe_experts.csv")
        warnings = " ".join(said(place)["warnings"])  # type: ignore[arg-type]
        assert "tables are missing or cut" in warnings

    @pytest.mark.parametrize("name", ["%2E%2E", "a/%2E%2E/%2E%2E/b", ""])
    def test_a_key_that_is_no_path_is_said(self, place: str, front: Front, name: str) -> None:
        path = f"/{place.removeprefix('s3://')}/{name}/metadata.json"
        asked = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
        asked.request("PUT", path, b"{}")
        assert asked.getresponse().status == 200
        front.seen.clear()
        assert_fails(invoke("summary", place), "a key there is no path")
        assert len(front.seen) == 1

    @pytest.mark.parametrize("name", ["a?b", "a#b", "a%2Fb", "a@b?c"])
    def test_keys_that_are_no_urls_are_passed_over(
        self, large: Path, place: str, front: Front, name: str
    ) -> None:
        send(large, f"{place}/{large.name}")
        for file in ("metadata.json", "totals.json"):
            path = f"/{place.removeprefix('s3://')}/{quote(name)}/{file}"
            asked = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
            asked.request("PUT", path, b"{}")
            assert asked.getresponse().status == 200
        for pattern in (place, f"{place}/*"):
            assert remote.sessions_at(pattern) == [f"{place}/{large.name}"]


class TestBadLines:
    @pytest.fixture(autouse=True)
    def small_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(storage, "PART_BYTES", 1 << 16)

    def test_a_connection_that_drops_goes_on_where_it_was(
        self, large: Path, place: str, front: Front
    ) -> None:
        send(large, f"{place}/{large.name}")
        front.drops, front.sent = 12, 0
        assert_same(f"{place}/{large.name}", large)
        assert front.drops == 0
        size = sum(path.stat().st_size for path in large.iterdir())
        # What had come is not fetched again: a part of it at most, and the listing.
        assert front.sent < 1.1 * size

    def test_a_server_that_never_answers_in_full_is_one_line(
        self, large: Path, place: str, front: Front
    ) -> None:
        send(large, f"{place}/{large.name}")
        front.drops = 10**6
        result = invoke("summary", f"{place}/{large.name}")
        assert_fails(result, "the store does not answer as it should, after 6 tries")
        assert len(front.seen) < 1_000

    def test_requests_that_are_cut_off_while_it_is_sent(
        self, large: Path, place: str, front: Front
    ) -> None:
        front.refuses = 5
        assert invoke("pack", large, "-o", f"{place}/kept").returncode == 0
        assert_same(f"{place}/kept", large)

    def test_what_changes_meanwhile_is_refused(self, place: str, tmp_path: Path) -> None:
        store = Store(place)
        store.send_bytes(bytes(1 << 18), "metadata.json")
        (before,) = store.objects()
        store.send_bytes(b"1" * (1 << 18), "metadata.json")
        with pytest.raises(SessionError, match="changed while it was read"):
            store.fetch(before, tmp_path / "copy", lambda _: None)


class TestRefusals:
    def test_what_is_there_is_not_replaced(self, large: Path, place: str) -> None:
        Store(place).send_bytes(b"x", "kept/file")
        assert_fails(invoke("pack", large, "-o", f"{place}/kept"), "is there already")

    def test_half_a_parquet_session_is_none(self, large: Path, place: str) -> None:
        assert invoke("pack", large, "-o", f"{place}/kept").returncode == 0
        Store(f"{place}/kept").remove("parquet.json")
        assert_fails(invoke("summary", f"{place}/kept"), "there is no session at")

    def test_no_session_no_bucket(self, place: str) -> None:
        assert_fails(invoke("summary", f"{place}/none"), "there is no session at")
        assert_fails(invoke("summary", "s3://elsewhere/none"), "there is no such bucket")
        assert_fails(invoke("pause", f"{place}/none"), "this works on a session's folder")

    @pytest.mark.parametrize(
        "url", [f"s3://me:{SECRET}@bucket/a", f"s3://bucket/a?key={SECRET}", f"s3:///{SECRET}"]
    )
    def test_no_secret_of_a_url_is_shown(self, large: Path, url: str) -> None:
        for command in (("summary", url), ("pack", large, "-o", url)):
            result = invoke(*command)
            assert result.returncode == 2
            assert SECRET not in result.stdout + result.stderr or "///" in url

    def test_credentials_are_shown_nowhere(
        self, large: Path, place: str, front: Front, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        send(large, f"{place}/{large.name}")
        results = [invoke("summary", f"{place}/{large.name}")]
        front.drops = front.refuses = 10**6
        results.append(invoke("summary", f"{place}/{large.name}"))
        assert all(SECRET not in each.stdout + each.stderr for each in results)

    def test_without_obstore_it_says_what_to_install(
        self, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "obstore", None)
        monkeypatch.setattr(storage, "find_spec", lambda name: None)
        assert_fails(invoke("summary", place), "pip install '.[storage]'")


def test_urls() -> None:
    assert url_of(Path("s3://bucket/a/b/")) == "s3://bucket/a/b"
    assert not is_url("/s3://bucket")
    assert redacted("gs://u:p@bucket/x?y=1") == "gs://***@bucket/x"
    for bad in ("s3://bucket/../a", "s3://bucket/a//b", "s3://bucket/\x1b[1m"):
        with pytest.raises(SessionError):
            url_of(bad)
