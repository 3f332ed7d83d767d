# SPDX-License-Identifier: Apache-2.0
"""A session as Parquet files says what it said, and comes back byte for byte."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import text

from analysis import open_session
from analysis.tables.schema import TABLES
from benchmarks import large_session
from tests.analysis.builder import SessionBuilder
from tests.analysis.invoke import invoke
from tests.analysis.journals import running_session
from tests.analysis.stories import swept
from tests.analysis.test_cli import assert_fails
from tests.analysis.test_segments import differences, said
from tests.export.reading import read as read_trace
from tests.pack.sessions import pack, texts, unpack
from tests.report import generated
from tests.support import segments

STORIES = {
    "swept": lambda folder: swept(SessionBuilder(folder)),
    "busy": lambda folder: generated.write(folder, 100),
    "large": lambda folder: large_session.write(folder, 2_000),
}


@pytest.fixture(params=STORIES)
def story(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / str(request.param)
    STORIES[request.param](folder)
    return folder


class TestEverySession:
    def test_it_says_the_same_and_comes_back(self, story: Path, tmp_path: Path) -> None:
        index = pack(story, tmp_path / "parquet")
        if story.name == "large":
            assert [entry["path"] for entry in index["files"] if "table" not in entry] == []
        assert differences(said(tmp_path / "parquet"), said(story)) == []
        assert unpack(tmp_path / "parquet", tmp_path / "back") == texts(story)

    def test_a_part_of_it_says_the_same(self, story: Path, tmp_path: Path) -> None:
        pack(story, tmp_path / "parquet")
        late = {"last_half": True}
        assert differences(said(tmp_path / "parquet", **late), said(story, **late)) == []

    def test_in_segments(self, story: Path, tmp_path: Path) -> None:
        expected = said(story)
        segments.split(story, *(segments.by_share(story, share) for share in (0.2, 0.5)))
        index = pack(story, tmp_path / "parquet")
        assert any(entry["path"].startswith("segments/0002/") for entry in index["files"])
        assert differences(said(tmp_path / "parquet"), expected) == []
        assert unpack(tmp_path / "parquet", tmp_path / "back") == texts(story)
        assert differences(said(tmp_path / "back"), expected) == []

    def test_with_a_segment_that_is_being_closed(self, story: Path, tmp_path: Path) -> None:
        expected = said(story)
        cuts = (segments.by_share(story, share) for share in (0.2, 0.5))
        segments.split(story, *cuts, closing=True)
        pack(story, tmp_path / "parquet")
        assert differences(said(tmp_path / "parquet"), expected) == []
        assert unpack(tmp_path / "parquet", tmp_path / "back") == texts(story)

    def test_a_window_of_it(self, story: Path, tmp_path: Path) -> None:
        segments.cut_at(story, 2.0, 4.0)
        segments.remove_before(story, 2)
        expected = said(story)
        assert expected["session"]["window"] is not None
        pack(story, tmp_path / "parquet")
        assert differences(said(tmp_path / "parquet"), expected) == []
        assert unpack(tmp_path / "parquet", tmp_path / "back") == texts(story)

    def test_every_command_reads_it(self, story: Path, tmp_path: Path) -> None:
        twin = tmp_path / "twins" / story.name
        twin.parent.mkdir()
        pack(story, twin)
        commands = (
            ("check", "--fail-if", "hit_rate<0.1", "--json"),
            ("compare", "--json"),
            ("whatif", "--fast", "--blocks", "50", "--json"),
            ("export", "load", "--format", "mooncake"),
            ("export", "perfetto"),
            ("export", "otlp"),
            ("report", "--no-replay"),
        )
        for command in commands:
            sessions = [[story], [twin]]
            if command[0] == "compare":
                sessions = [[story, twin], [twin, story]]
            first, second = (invoke(*command, *each) for each in sessions)
            assert first.returncode == second.returncode, (first.stderr, second.stderr)
        files = {path.name for path in twin.iterdir()} - {path.name for path in story.iterdir()}
        assert all("parquet" in name for name in files)
        assert (twin / "load.mooncake.jsonl").read_bytes() == (
            story / "load.mooncake.jsonl"
        ).read_bytes()
        spans = [(folder / "spans.otlp.jsonl").read_bytes() for folder in (story, twin)]
        assert spans[0] == spans[1]
        traces = [read_trace(folder / "trace.pftrace") for folder in (story, twin)]
        assert traces[0].slices == traces[1].slices


class TestTextOfSomebodyElse:
    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(name=text(max_size=20), other=text(max_size=5))
    def test_names_come_back(
        self, tmp_path_factory: pytest.TempPathFactory, name: str, other: str
    ) -> None:
        base = tmp_path_factory.mktemp("names")
        session = SessionBuilder(base / "session")
        row = {"timestamp": 0.5, "input_length": 3, "request_id": name, "lora": other}
        session.requests({**row, "finish_sec": 2e-06, "queue_sec": 0.0}, row)
        quoted = '"' + re.sub(r"[\0\r\n]", " ", name).replace('"', '""') + '"'
        session.append(
            "prefix_cache_lookups.csv",
            "timestamp_sec,request_id,query_tokens,hit_tokens,external_hit_tokens,kind,admitted,"
            f"lookups,engine\n1.000000,{quoted},3,0,0,first,1,1,0\n",
        )
        pack(session.folder, base / "parquet")
        assert unpack(base / "parquet", base / "back") == texts(session.folder)

    @pytest.mark.parametrize(
        "rows",
        [
            b"1.5,90\r\n",
            b"1.500000,a\n",
            b"1.5000,1\n2.50,1\n",
            b"1.500000",
            b"1e-06,1\n",
            b"\xff\xfe\n",
            b'"1.500000",1\n',
            b"1.500000,1,1,1,1,1,1,1,1,1,1,1,1\n",
            b"\n\n",
            b"1.500000,9223372036854775808,,,,,,,,\n",
            b"9999999999999.500000,1.00,1,1,0,0,1,1,0,0\n",
            b"nan,1.00,1,1,0,0,1,1,0,0\n",
        ],
    )
    def test_odd_rows_come_back(self, session: SessionBuilder, tmp_path: Path, rows: bytes) -> None:
        session.usage((0, 50), (5, 0))
        path = session.folder / "kv_cache_usage.csv"
        path.write_bytes(path.read_bytes() + rows)
        pack(session.folder, tmp_path / "parquet")
        assert unpack(tmp_path / "parquet", tmp_path / "back") == texts(session.folder)

    @pytest.mark.parametrize("content", [b"", b"\n", b"no table", b"timestamp_sec\n"])
    def test_odd_files_come_back(
        self, session: SessionBuilder, tmp_path: Path, content: bytes
    ) -> None:
        for name in ("kv_cache_usage.csv", "requests.jsonl"):
            (session.folder / name).write_bytes(content)
        pack(session.folder, tmp_path / "parquet")
        assert unpack(tmp_path / "parquet", tmp_path / "back") == texts(session.folder)

    def test_columns_of_a_newer_release_stay_rows(
        self, session: SessionBuilder, tmp_path: Path
    ) -> None:
        row = "1.000000,50.00,50,100,50,0,1,0,0,0"
        header = (
            "timestamp_sec,usage_pct,num_blocks,total_blocks,cached_blocks,free_blocks,"
            "running_reqs,waiting_reqs,engine,pool,mood\n"
        )
        session.append("kv_cache_usage.csv", f'{header}{row},fine\n{row},"a,b"\n{row},\n')
        index = pack(session.folder, tmp_path / "parquet")
        assert index["tables"]["kv_cache_usage"]["appended"] == ["mood"]
        assert unpack(tmp_path / "parquet", tmp_path / "back") == texts(session.folder)
        assert differences(said(tmp_path / "parquet"), said(session.folder)) == []


class TestOlderReleases:
    """A table lacks a column that was appended since: it is null, as in the CSV file."""

    @pytest.fixture
    def older(self, session: SessionBuilder, monkeypatch: pytest.MonkeyPatch) -> SessionBuilder:
        session.usage((0, 50), (5, 0))
        session.requests({"timestamp": 1.5, "request_id": "a", "input_length": 3})
        for name in ("kv_cache_usage", "requests"):
            table = TABLES[name]
            more = {**table.columns, "mood": pl.String, "moods": pl.Float64}
            newer = replace(table, columns=more)
            monkeypatch.setitem(TABLES, name, newer)  # type: ignore[arg-type]
        return session

    def test_it_is_packed_as_rows_and_comes_back(
        self, older: SessionBuilder, tmp_path: Path
    ) -> None:
        index = pack(older.folder, tmp_path / "parquet")
        assert "mood" not in index["tables"]["kv_cache_usage"]["columns"]
        assert unpack(tmp_path / "parquet", tmp_path / "back") == texts(older.folder)

    def test_one_that_was_packed_before_is_read(
        self, session: SessionBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        session.usage((0, 50), (5, 0))
        session.requests({"timestamp": 1.5, "request_id": "a", "input_length": 3})
        pack(session.folder, tmp_path / "parquet")
        before = texts(session.folder)
        for name in ("kv_cache_usage", "requests"):
            more = {**TABLES[name].columns, "mood": pl.String, "moods": pl.List(pl.Int64)}
            newer = replace(TABLES[name], columns=more)
            monkeypatch.setitem(TABLES, name, newer)  # type: ignore[arg-type]
        for folder in (session.folder, tmp_path / "parquet"):
            opened = open_session(folder)
            for name in ("kv_cache_usage", "requests"):
                rows = opened.collect(name, lambda rows: rows.select("mood", "moods"))
                assert rows["mood"].null_count() == rows.height > 0
                assert rows["moods"].null_count() == rows.height
                (batch,) = opened.batches(name, ["moods"], history=True)
                assert batch["moods"].null_count() == batch.height == rows.height
        assert unpack(tmp_path / "parquet", tmp_path / "back") == before


class TestOtherReaders:
    def test_a_file_describes_itself(self, tmp_path: Path) -> None:
        large_session.write(tmp_path / "large", 2_000)
        pack(tmp_path / "large", tmp_path / "parquet")
        path = tmp_path / "parquet" / "kv_cache_evictions.parquet"
        about = json.loads(pl.read_parquet_metadata(path)["profilemate"])
        assert (about["parquet_version"], about["table"]) == (1, "kv_cache_evictions")
        assert about["columns"]["lifetime_sec"] == {"unit": "s", "decimals": 6}
        assert about["columns"]["reuse_count"] == {"unit": "times"}
        rows = pl.read_parquet(path)
        plain = pl.read_csv(tmp_path / "large" / "kv_cache_evictions.csv")
        assert rows.columns == plain.columns
        assert rows["content_id"].equals(plain["content_id"])
        assert rows["timestamp_sec"].cast(pl.Float64).equals(plain["timestamp_sec"])

    def test_row_groups_have_statistics(self, tmp_path: Path) -> None:
        parquet = pytest.importorskip("pyarrow.parquet")
        large_session.write(tmp_path / "large", 2_000)
        pack(tmp_path / "large", tmp_path / "parquet")
        found = parquet.ParquetFile(tmp_path / "parquet" / "kv_cache_evictions.parquet").metadata
        column = found.row_group(0).column(0)
        assert column.compression == "ZSTD"
        assert column.statistics.has_min_max


def test_sizes_of_a_small_session_are_in_kilobytes(tmp_path: Path) -> None:
    large_session.write(tmp_path / "small", 100)
    said = invoke("pack", tmp_path / "small", "-o", tmp_path / "parquet").stdout.splitlines()[0]
    assert re.fullmatch(r"[1-9]\S* kB of tables are [1-9]\S* kB as Parquet, [1-9]\S* %", said)


class TestRefusals:
    def test_a_session_that_runs(self, tmp_path: Path) -> None:
        folder = running_session(tmp_path)
        assert_fails(invoke("pack", folder, "-o", tmp_path / "parquet"), "still runs")
        assert not (tmp_path / "parquet").exists()

    def test_a_parquet_session(self, session: SessionBuilder, tmp_path: Path) -> None:
        pack(session.folder, tmp_path / "parquet")
        assert_fails(invoke("pack", tmp_path / "parquet"), "is a Parquet session already")
        assert_fails(invoke("snapshot", tmp_path / "parquet"), "copy its folder")

    def test_a_session_to_unpack(self, session: SessionBuilder) -> None:
        assert_fails(invoke("unpack", session.folder), "is no Parquet session")

    def test_nothing_is_replaced(self, session: SessionBuilder, tmp_path: Path) -> None:
        pack(session.folder, tmp_path / "parquet")
        before = sorted(tmp_path.rglob("*"))
        assert_fails(invoke("pack", session.folder, "-o", tmp_path / "parquet"), "there already")
        # Its name is that of the session beside it.
        shutil.move(tmp_path / "parquet", session.folder.with_name("p"))
        assert_fails(invoke("unpack", session.folder.with_name("p")), "there already")
        shutil.move(session.folder.with_name("p"), tmp_path / "parquet")
        assert sorted(tmp_path.rglob("*")) == before

    def test_without_a_name_it_lies_beside_the_session(self, session: SessionBuilder) -> None:
        session.usage((0, 50), (5, 0))
        before = texts(session.folder)
        assert invoke("pack", session.folder).returncode == 0
        shutil.rmtree(session.folder)
        place = session.folder.with_name(f"{session.folder.name}_parquet")
        result = invoke("unpack", place)
        assert result.stdout.splitlines()[-1] == str(session.folder)
        assert texts(session.folder) == before

    def test_a_folder_that_cannot_be_written(self, session: SessionBuilder, tmp_path: Path) -> None:
        result = invoke("pack", session.folder, "-o", tmp_path / "missing" / "parquet")
        assert_fails(result, "cannot write")
