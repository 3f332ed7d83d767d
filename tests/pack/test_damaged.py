# SPDX-License-Identifier: Apache-2.0
"""A Parquet session that is damaged, forged, or has rows that cannot be: one line each."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import SessionError, open_session
from analysis.tables.schema import TABLES
from benchmarks import large_session
from tests.analysis.builder import COLUMNS, SessionBuilder
from tests.analysis.impossible import sound
from tests.analysis.invoke import invoke
from tests.analysis.test_cli import assert_fails
from tests.pack.sessions import forge, pack, unpack

EVICTIONS = "kv_cache_evictions.parquet"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("packed")
    large_session.write(base / "large", 2_000)
    # No such row is written as the collector does it, so the text is kept.
    with open(base / "large" / "gpu_memory.csv", "a") as file:
        file.write('"1.5",0,5,5,50\n')
    pack(base / "large", base / "parquet")
    return base / "parquet"


@pytest.fixture
def folder(packed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(packed, tmp_path / "parquet")


def assert_refused(folder: Path, *says: str) -> None:
    """By every reader, with one line that names the file."""
    for command in (("summary", "--no-replay"), ("unpack", "-o", folder.with_name("back"))):
        result = invoke(command[0], folder, *command[1:])
        for each in says:
            assert_fails(result, each)
    assert not folder.with_name("back").exists()


class TestFiles:
    @pytest.mark.parametrize("name", [EVICTIONS, "requests.parquet", "texts.parquet"])
    @pytest.mark.parametrize("keep", [0, 1, 100, -1, -40])
    def test_cut_short(self, folder: Path, name: str, keep: int) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:keep])
        assert_refused(folder, f"{name}")

    @pytest.mark.parametrize("at", [0, 0.1, 0.5, 0.9, 1])
    @pytest.mark.parametrize("name", [EVICTIONS, "scheduler_steps.parquet"])
    def test_one_byte_is_another(self, folder: Path, name: str, at: float) -> None:
        path = folder / name
        content = bytearray(path.read_bytes())
        content[int(at * (len(content) - 1))] ^= 0x10
        path.write_bytes(content)
        assert_refused(folder, name, "its bytes are not those that were written")

    @pytest.mark.parametrize("name", [EVICTIONS, "texts.parquet"])
    def test_missing(self, folder: Path, name: str) -> None:
        (folder / name).unlink()
        assert_refused(folder, name, "No such file")

    @pytest.mark.parametrize("name", [EVICTIONS, "texts.parquet"])
    def test_a_pipe_or_a_link(self, folder: Path, name: str) -> None:
        path = folder / name
        path.rename(folder.with_name("elsewhere"))
        path.symlink_to("../elsewhere")
        assert_refused(folder, name)
        path.unlink()
        os.mkfifo(path)
        assert_refused(folder, name, "it is a pipe or a device")


class TestForged:
    @pytest.mark.parametrize(
        ("rows", "says"),
        [
            (lambda rows: rows.head(100), "it has 100 rows, not the 2,000 of the index"),
            (lambda rows: rows.with_columns(pl.col("block_id").cast(pl.Float64)), "block_id is"),
            (lambda rows: rows.with_columns(pl.col("idle_sec").cast(pl.Float64)), "idle_sec is"),
            (lambda rows: rows.drop("reason"), "reason is None, not String"),
        ],
    )
    def test_other_rows(
        self, folder: Path, rows: Callable[[pl.DataFrame], pl.DataFrame], says: str
    ) -> None:
        path = folder / EVICTIONS
        about = pl.read_parquet_metadata(path)["profilemate"]
        rows(pl.read_parquet(path)).write_parquet(path, metadata={"profilemate": about})
        forge(folder, lambda index: None)
        assert_refused(folder, EVICTIONS, says)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"parquet_version": 2}, "its parquet_version is 2, and this analyzer reads 1"),
            ({"table": "requests"}, "it is another table's"),
            (None, "does not describe a table"),
        ],
    )
    def test_another_description(
        self, folder: Path, change: dict[str, Any] | None, says: str
    ) -> None:
        path = folder / EVICTIONS
        about = json.loads(pl.read_parquet_metadata(path)["profilemate"])
        said = "x" if change is None else json.dumps({**about, **change})
        pl.read_parquet(path).write_parquet(path, metadata={"profilemate": said})
        forge(folder, lambda index: None)
        assert_refused(folder, EVICTIONS, says)

    @pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(64) + b"PAR1"])
    def test_no_parquet_at_all(self, folder: Path, content: bytes) -> None:
        (folder / EVICTIONS).write_bytes(content)
        forge(folder, lambda index: None)
        assert_refused(folder, EVICTIONS, "Polars cannot read it")

    def test_a_place_that_is_not_there(self, folder: Path) -> None:
        path = folder / "requests.parquet"
        about = pl.read_parquet_metadata(path)["profilemate"]
        rows = pl.read_parquet(path).with_columns(pl.col("hash_ids").list.head(1))
        rows.write_parquet(path, metadata={"profilemate": about})
        forge(folder, lambda index: None)
        assert_refused(folder, "requests.parquet", "prefix_ids has a place")

    def test_another_text(self, folder: Path) -> None:
        path = folder / "texts.parquet"
        rows = pl.read_parquet(path)
        changed = rows.with_columns(pl.lit(b"timestamp_sec\n").alias("text"))
        changed.write_parquet(path)
        assert_refused(folder, "texts.parquet", "it is not the text that the index describes")

    def test_digests_of_another_text(self, folder: Path) -> None:
        def change(index: dict[str, Any]) -> None:
            for entry in index["files"]:
                entry["sha256"] = "0" * 64

        forge(folder, change)
        result = invoke("unpack", folder, "-o", folder.with_name("back"))
        assert_fails(result, "does not come out as it was")
        assert not folder.with_name("back").exists()


class TestIndex:
    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ("{", "it is not JSON"),
            ("[]", "it is not a JSON object"),
            ('{"parquet_version": 2}', "its parquet_version is '2', and this analyzer reads 1"),
            ('{"parquet_version": 1}', "an entry is missing"),
            ("[" * 100_000, "it is not JSON"),
        ],
    )
    def test_content(self, folder: Path, content: str, says: str) -> None:
        (folder / "parquet.json").write_text(content)
        assert_refused(folder, "parquet.json", says)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda index: index["files"][0].update(path="../evil"), "is no file of a session"),
            (lambda index: index["files"][0].update(path="/etc/evil"), "is no file of a session"),
            (lambda index: index["files"][0].update(path="a\nb"), "is no file of a session"),
            (lambda index: index["files"].append(index["files"][0]), "there twice"),
            (lambda index: index["files"][0].update(rows=-1), "rows is '-1', which is no count"),
            (lambda index: index["files"][0].update(rows=10**10), "rows"),
            (lambda index: index["files"][0].update(sha256="x"), "a digest is none"),
            (lambda index: index["files"][0].update(table="other"), "an entry is missing"),
            (lambda index: index["tables"].pop("requests"), "requests has no Parquet file"),
            (
                lambda index: index["tables"]["requests"].update(group_rows=10**9),
                "group_rows of requests is 1,000,000,000",
            ),
            (lambda index: index["tables"]["requests"].update(keys=["mood"]), "has other columns"),
            (
                lambda index: index["tables"]["kv_cache_usage"].update(decimals={"pool": 99}),
                "has no such decimals",
            ),
            (lambda index: index.update(files=[1]), "an entry is missing"),
        ],
    )
    def test_entries(
        self, folder: Path, change: Callable[[dict[str, Any]], object], says: str
    ) -> None:
        forge(folder, change)
        assert_refused(folder, "parquet.json", says)

    @pytest.mark.parametrize("name", ["../evil", "", ".", "a\0b", "a\nb", "\x1b[2J", "\ud800"])
    def test_a_name_that_is_none(self, folder: Path, tmp_path: Path, name: str) -> None:
        forge(folder, lambda index: index.update(session=name))
        before = [*tmp_path.iterdir()]
        assert_fails(invoke("unpack", folder), "is no name for a folder; name one with -o")
        assert [*tmp_path.iterdir()] == before
        assert invoke("unpack", folder, "-o", tmp_path / "named").returncode == 0


class TestRows:
    def test_a_row_that_breaks_a_rule_is_named(
        self, session: SessionBuilder, tmp_path: Path
    ) -> None:
        header = COLUMNS["kv_cache_usage.csv"]
        good = "{}.000000,50.00,50,100,50,0,1,0,0,0"
        rows = [good.format(1), good.format(2).replace(",50,100,", ",51,100,"), good.format(3)]
        session.append("kv_cache_usage.csv", "\n".join([header, *rows, ""]))
        index = pack(session.folder, tmp_path / "parquet")
        assert "kv_cache_usage" in index["tables"]
        for folder, file in (
            (session.folder, "kv_cache_usage.csv"),
            (tmp_path / "parquet", "kv_cache_usage.parquet"),
        ):
            said = f"{file}, line 3: held, cached and free blocks together are not the pool's"
            assert_fails(invoke("summary", folder), said)

    def test_rows_out_of_order(self, session: SessionBuilder, tmp_path: Path) -> None:
        header = COLUMNS["kv_cache_usage.csv"]
        good = "{}.000000,50.00,50,100,50,0,1,0,0,0"
        rows = [good.format(second) for second in (1, 3, 2)]
        session.append("kv_cache_usage.csv", "\n".join([header, *rows, ""]))
        pack(session.folder, tmp_path / "parquet")
        opened = open_session(tmp_path / "parquet")
        with pytest.raises(SessionError, match=r"kv_cache_usage\.parquet, line 4: timestamp_sec"):
            opened.collect("kv_cache_usage", lambda rows: rows)

    def test_a_line_that_is_cut_short_is_as_it_was(
        self, session: SessionBuilder, tmp_path: Path
    ) -> None:
        session.usage((0, 50), (5, 0))
        session.append("kv_cache_usage.csv", "7,50")
        session.requests({**sound("requests"), "timestamp": 1.5})
        pack(session.folder, tmp_path / "parquet")
        for folder in (session.folder, tmp_path / "parquet"):
            said = "kv_cache_usage.csv, line 4: 2 fields instead of 10"
            assert_fails(invoke("summary", folder), said)
        assert unpack(tmp_path / "parquet", tmp_path / "back")["kv_cache_usage.csv"].endswith(
            b"\n7,50"
        )

    def test_of_a_session_that_was_cut_off_the_last_whole_line_counts(
        self, session: SessionBuilder, tmp_path: Path
    ) -> None:
        session.metadata(complete=False)
        session.usage((0, 50), (5, 0))
        session.append("kv_cache_usage.csv", "7,50")
        pack(session.folder, tmp_path / "parquet")
        for folder in (session.folder, tmp_path / "parquet"):
            opened = open_session(folder)
            assert opened.state == "cut off"
            assert opened.end_sec == 5
            rows = opened.collect("kv_cache_usage", lambda rows: rows.select("timestamp_sec"))
            assert rows.to_series().to_list() == [0, 5]

    def test_a_row_of_an_older_release_that_breaks_a_rule_is_named(
        self, session: SessionBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        more = {**TABLES["kv_cache_usage"].columns, "mood": pl.Int64}
        newer = replace(TABLES["kv_cache_usage"], columns=more)
        monkeypatch.setitem(TABLES, "kv_cache_usage", newer)  # type: ignore[arg-type]
        header = COLUMNS["kv_cache_usage.csv"]
        good = "{}.000000,50.00,50,100,50,0,1,0,0,0"
        rows = [good.format(1), good.format(2).replace(",50,100,", ",51,100,")]
        session.append("kv_cache_usage.csv", "\n".join([header, *rows, ""]))
        pack(session.folder, tmp_path / "parquet")
        for folder in (session.folder, tmp_path / "parquet"):
            with pytest.raises(SessionError, match="line 3: held, cached and free blocks"):
                open_session(folder).collect("kv_cache_usage", lambda rows: rows)

    def test_a_header_without_a_required_column_is_none(self, session: SessionBuilder) -> None:
        session.append("kv_cache_usage.csv", "timestamp_sec,usage_pct\n1.0,50.00\n")
        assert_fails(invoke("summary", session.folder), "line 1: nothing where column 3 is")
