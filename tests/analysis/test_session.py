# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import analysis
from analysis import SessionError, open_session, summarize
from analysis.tables.find import find_session
from analysis.tables.schema import TABLES
from tests.analysis.builder import COLUMNS, METADATA, SessionBuilder, sound_row
from tests.analysis.invoke import invoke
from tests.analysis.journals import ended_session, running_session
from tests.analysis.test_cli import run

USAGE = "kv_cache_usage.csv"
GOOD_ROW = "1.5,10.00,10,100,0,90,1,0,0,0\n"


def error_of(session: SessionBuilder) -> str:
    """What the analyzer says of a session that it cannot read, in one line."""
    with pytest.raises(SessionError) as caught:
        summarize(open_session(session.folder))
    text = str(caught.value)
    assert "\n" not in text
    assert str(session.folder) in text
    return text


def test_a_prompt_can_complete_the_public_names() -> None:
    assert {"open_session", "summarize", "measures", "check"} <= set(dir(analysis))


@pytest.mark.parametrize("verb", ["summary", "check", "report"])
def test_a_folder_may_have_any_name(tmp_path: Path, verb: str) -> None:
    """Polars opens no file whose name is not UTF-8."""
    session = SessionBuilder(tmp_path / os.fsdecode(b"n\xff"))
    session.usage((0, 50), (5, 0))
    options = {
        "check": ["--fail-if", "evictions>1"],
        # Its path is printed as it is.
        "report": ["-o", str(tmp_path / "report.html")],
    }
    result = run(["-m", "profilemate"], verb, session.folder, *options.get(verb, []))
    assert (result.returncode, result.stderr) == (0, "")


def test_the_schemas_are_those_of_the_format() -> None:
    for file, header in COLUMNS.items():
        table = TABLES[file.removesuffix(".csv")]
        assert table.file == file
        assert ",".join(table.columns) == header


def test_missing_tables_are_empty_and_have_their_columns(session: SessionBuilder) -> None:
    opened = open_session(session.folder)
    for table in TABLES.values():
        frame = opened.scan(table.name)
        assert frame.collect_schema() == pl.Schema(dict(table.columns))
        assert frame.collect().is_empty()
        assert list(opened.batches(table.name, list(table.columns))) == []


def test_frames_are_lazy_and_typed(session: SessionBuilder) -> None:
    session.usage((1, 10), (2, 20))
    frame = open_session(session.folder).scan("kv_cache_usage")
    assert isinstance(frame, pl.LazyFrame)
    assert frame.select(pl.col("num_blocks").sum()).collect().item() == 30


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("complete", [True, False])
def test_lazy_frames_of_any_session_can_be_queried(session: SessionBuilder, complete: bool) -> None:
    session.metadata(complete=complete)
    session.usage((1, 10), (2, 20), (3, 30), (4, 40))
    session.requests({"request_id": "a", "hash_ids": [7, 8]}, {"request_id": "b"})
    opened = open_session(session.folder)
    table = opened.scan("kv_cache_usage")
    assert table.head(2).collect()["num_blocks"].to_list() == [10, 20]
    late = table.filter(pl.col("timestamp_sec") > 1.5)
    assert late.select("num_blocks").head(2).collect().rows() == [(20,), (30,)]
    assert late.select(pl.len()).collect(engine="streaming").item() == 3
    requests = opened.scan("requests")
    assert requests.select("hash_ids").collect().rows() == [([7, 8],), ([],)]
    assert opened.collect("requests", lambda rows: rows.select(pl.len())).item() == 2


def test_columns_that_a_newer_version_appended_are_read_over(session: SessionBuilder) -> None:
    (session.folder / USAGE).write_text(
        COLUMNS[USAGE] + ",colour,shape\n" + GOOD_ROW.replace("\n", ",red,\n") * 2
    )
    opened = open_session(session.folder)
    assert opened.scan("kv_cache_usage").collect().width == 10
    assert summarize(opened).usage.pools[0].peak_pct == 10


def test_text_of_clients_comes_through(session: SessionBuilder) -> None:
    ids = ['a,"b"', "'=1+1", "x\\x0ay", "naïve"]
    session.lookups(*({"request_id": name, "query_tokens": 9, "hit_tokens": 0} for name in ids))
    table = open_session(session.folder).scan("prefix_cache_lookups")
    assert table.collect()["request_id"].to_list() == ids


def test_a_folder_with_a_pattern_in_its_name(tmp_path: Path) -> None:
    session = SessionBuilder(tmp_path / "session_[ab]*")
    session.usage((1, 10))
    session.rows("kv_cache_allocations.csv", {"event": "free", "num_blocks": 3})
    summary = summarize(open_session(session.folder))
    assert summary.usage.pools[0].peak_pct == 10
    assert summary.allocations.freed.blocks == 3


class TestFinding:
    def test_a_session_is_taken_as_it_is(self, session: SessionBuilder) -> None:
        assert find_session(session.folder) == session.folder

    def test_the_newest_of_a_folder_by_the_time_in_its_name(self, tmp_path: Path) -> None:
        for name in (
            "session_20260131_120000_9_aaaaaa",
            "session_20260201_000000_1_bbbbbb",
            "session_20260131_235959_5_cccccc",
        ):
            folder = SessionBuilder(tmp_path / name).folder
            os.utime(folder, (10**9, 10**9))
        os.utime(tmp_path / "session_20260131_120000_9_aaaaaa", (2 * 10**9, 2 * 10**9))
        (tmp_path / "session_20260301_000000_1_nothing").mkdir()
        (tmp_path / "session_20260301_000000_1_file").touch()
        assert find_session(tmp_path).name == "session_20260201_000000_1_bbbbbb"

    def test_without_a_path_the_configured_folder(
        self, session: SessionBuilder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_PROFILING_DIR", str(session.folder.parent))
        assert find_session() == session.folder

    def test_without_a_configuration_the_temporary_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("VLLM_PROFILING_DIR", raising=False)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        session = SessionBuilder(tmp_path / "vllm_profiling" / "session_20260131_120000_1_a")
        assert find_session() == session.folder

    @pytest.mark.parametrize(
        ("path", "says"),
        [
            ("nowhere", "there is no folder"),
            ("file", "is a file"),
            ("empty", "no session in"),
        ],
    )
    def test_what_is_no_session(self, tmp_path: Path, path: str, says: str) -> None:
        (tmp_path / "file").touch()
        (tmp_path / "empty" / "other").mkdir(parents=True)
        with pytest.raises(SessionError, match=says) as caught:
            find_session(tmp_path / path)
        assert str(tmp_path / path) in str(caught.value)

    def test_no_session_yet(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_PROFILING_DIR", str(tmp_path / "later"))
        with pytest.raises(SessionError, match=r"no session yet: .*later does not exist"):
            find_session()


class TestMetadata:
    @pytest.mark.parametrize("version", [0, -1, "2", None, 10**400, [1]])
    def test_no_format_is_refused(self, session: SessionBuilder, version: Any) -> None:
        session.metadata(format_version=version)
        assert "metadata.json: format_version is " in error_of(session)

    def test_a_newer_format_is_read_with_a_warning(self, session: SessionBuilder) -> None:
        session.metadata(format_version=2)
        session.usage((1, 10), (3, 20))
        (warning,) = summarize(open_session(session.folder)).warnings
        assert "format_version is 2, and this analyzer reads 1" in warning

    def test_broken_json_is_named_with_its_line(self, session: SessionBuilder) -> None:
        (session.folder / "metadata.json").write_text('{\n"format_version": 1,\n"host" 2}')
        assert "metadata.json, line 3: not JSON" in error_of(session)

    def test_something_else_than_an_object(self, session: SessionBuilder) -> None:
        (session.folder / "metadata.json").write_text("[1]")
        assert "metadata.json: not a JSON object" in error_of(session)

    def test_bytes_that_are_no_text(self, session: SessionBuilder) -> None:
        (session.folder / "metadata.json").write_bytes(b'{"a": "\xff\xfe"}')
        assert "metadata.json: not UTF-8 text" in error_of(session)

    def test_strange_parts_are_unknown_and_do_no_harm(self, session: SessionBuilder) -> None:
        strange = dict.fromkeys(METADATA, "strange") | {"format_version": 1, "complete": True}
        (session.folder / "metadata.json").write_text(json.dumps(strange))
        session.usage((1, 10))
        facts = summarize(open_session(session.folder)).facts
        assert (facts.model, facts.pool_blocks, facts.max_concurrency) == (None, None, None)
        assert facts.groups == ()

    def test_without_metadata_the_tables_still_speak(self, session: SessionBuilder) -> None:
        session.usage((1, 10), (3, 20))
        (session.folder / "metadata.json").unlink()
        summary = summarize(open_session(session.folder))
        assert summary.usage.pools[0].mean_pct == 10
        assert summary.session.session_id == session.folder.name
        assert summary.warnings == ("metadata.json is missing: what ran is not known",)


class TestMalformed:
    @pytest.mark.parametrize(
        ("row", "line", "says"),
        [
            ("1.5,ten,10,100,0,90,1,0,0,0\n", 3, "usage_pct is 'ten', not a number"),
            ("1.5,10.00,1.5,100,0,90,1,0,0,0\n", 3, "num_blocks is '1.5', not a whole number"),
            ("1.5,10.00,10,100\n", 3, "4 fields instead of 10"),
            ("1.5,10.00,10,100,0,90,1,0,,0\n", 3, "engine is empty"),
            ("\n" + GOOD_ROW, 3, "0 fields instead of 10"),
            (GOOD_ROW * 2 + '1.5,"10,10,100,0,90,1,0,0,0\n', 5, "not CSV"),
            (GOOD_ROW + "1.5,10.00,10,100,0,9", 4, "6 fields instead of 10"),
            ("\0\0\0\0\n", 3, "not text (a NUL byte)"),
        ],
    )
    def test_a_bad_row_is_named(
        self, session: SessionBuilder, row: str, line: int, says: str
    ) -> None:
        session.usage((1, 10))
        session.append(USAGE, row)
        text = error_of(session)
        assert f"{USAGE}, line {line}: " in text
        assert says in text

    def test_bytes_that_are_no_text(self, session: SessionBuilder) -> None:
        session.lookups({"request_id": "a", "query_tokens": 9, "hit_tokens": 0})
        path = session.folder / "prefix_cache_lookups.csv"
        path.write_bytes(path.read_bytes() + b"2,\xff\xfe,9,0,0,first,1,1,0\n")
        assert "prefix_cache_lookups.csv, line 3: not UTF-8 text (byte 3)" in error_of(session)

    def test_a_comma_that_is_not_quoted(self, session: SessionBuilder) -> None:
        session.lookups({"request_id": "a", "query_tokens": 9, "hit_tokens": 0})
        session.append("prefix_cache_lookups.csv", "2,a,b,9,0,0,first,1,1,0\n")
        assert "prefix_cache_lookups.csv, line 3: 10 fields instead of 9" in error_of(session)

    @pytest.mark.parametrize("table", list(COLUMNS))
    def test_a_row_cut_short_is_found_in_every_table(
        self, session: SessionBuilder, table: str
    ) -> None:
        session.rows(table, {})
        text = (session.folder / table).read_text()
        # A good row needs what the builder leaves out.
        good = f"{text.splitlines()[0]}\n{','.join(sound_row(table))}\n"
        (session.folder / table).write_text(good)
        summarize(open_session(session.folder))
        (session.folder / table).write_text(good + "1,2,3\n")
        assert f"{table}, line 3: 3 fields instead of" in error_of(session)

    def test_another_header_is_not_guessed_at(self, session: SessionBuilder) -> None:
        (session.folder / USAGE).write_text(COLUMNS[USAGE].replace("num_", "used_") + "\n")
        assert f"{USAGE}, line 1: 'used_blocks' where column 3 is 'num_blocks'" in error_of(session)
        (session.folder / USAGE).write_text("timestamp_sec,usage_pct\n")
        assert "nothing where column 3 is 'num_blocks'" in error_of(session)

    @pytest.mark.parametrize("content", [b"\xff" * 500, b"a\rb" * 500, b"\0" * 500])
    def test_what_is_no_table_is_said_in_short(
        self, session: SessionBuilder, content: bytes
    ) -> None:
        (session.folder / USAGE).write_bytes(content + b"\n1,2\n")
        text = error_of(session)
        assert "; restore the recorded file, or make it again with" in text
        assert len(text) < len(str(session.folder)) + 260
        (session.folder / USAGE).unlink()
        session.requests({"request_id": "a"})
        session.append("requests.jsonl", '{"input_length": "' + "\ufffd" * 500 + '"}\n')
        assert len(error_of(session)) < len(str(session.folder)) + 260

    def test_what_may_not_be_read_is_said_with_a_remedy(
        self, session: SessionBuilder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As it is of a user who is not the owner; a test may run as one who may read all."""
        session.usage((1, 10))

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr("analysis.tables.session.extent", refuse)
        says = f"cannot read {session.folder / USAGE}: Permission denied; run this as its owner"
        assert says in error_of(session)
        monkeypatch.setattr("analysis.tables.find.is_session", refuse)
        result = invoke("summary", session.folder)
        assert result.stderr.startswith(f"profilemate: cannot read {session.folder}: Permission")
        assert result.stderr.count("\n") == 1

    @pytest.mark.parametrize(
        ("row", "says"),
        [
            ("{broken\n", "not JSON"),
            ("[1, 2]\n", "not a JSON object"),
            ('{"input_length": "long"}\n', "input_length is '\"long\"', not a whole number"),
        ],
    )
    def test_a_bad_request_is_named(self, session: SessionBuilder, row: str, says: str) -> None:
        session.requests({"request_id": "a"}, {"request_id": "b"})
        session.append("requests.jsonl", row)
        text = error_of(session)
        assert "requests.jsonl, line 3: " in text
        assert says in text

    @pytest.mark.parametrize("file", [*COLUMNS, "requests.jsonl", "metadata.json"])
    def test_a_file_that_cannot_be_read(self, session: SessionBuilder, file: str) -> None:
        session.usage((1, 10))
        (session.folder / file).unlink(missing_ok=True)
        (session.folder / file).mkdir()
        if file == "metadata.json":
            session.append(USAGE, "")
        text = error_of(session)
        assert text == f"cannot read {session.folder / file}: Is a directory"


class TestIncomplete:
    def test_a_running_session_is_read_up_to_its_last_finished_line(self, tmp_path: Path) -> None:
        folder = running_session(tmp_path)
        session = SessionBuilder(folder)
        session.metadata(complete=False, ended_at=None)
        session.usage((1, 40), (3, 80))
        session.append(USAGE, "5,100.0")
        session.requests({"request_id": "a", "finish_reason": "stop"})
        session.append("requests.jsonl", '{"request_id": "b", "fin')
        session.append("scheduler_steps.csv", "timestamp_sec,st")
        opened = open_session(folder)
        summary = summarize(opened)
        assert summary.session.state == "running"
        assert summary.session.note == "what follows goes up to its last finished line"
        # 40 % from 1 to 3 s; the session has been seen up to 3 s.
        assert summary.session.duration_sec == 3
        assert summary.usage.pools[0].mean_pct == 40
        assert summary.usage.pools[0].end.held_blocks == 80
        assert summary.requests.ended == 1
        assert (folder / "journal").is_dir()

    def test_rows_that_come_while_it_is_read_are_left_for_the_next_time(
        self, tmp_path: Path
    ) -> None:
        session = SessionBuilder(running_session(tmp_path))
        session.metadata(complete=False)
        session.usage((1, 40), (3, 80))
        opened = open_session(session.folder)
        assert opened.scan("kv_cache_usage").collect().height == 2
        session.append(USAGE, GOOD_ROW + "2,torn")
        assert opened.scan("kv_cache_usage").collect().height == 2
        assert open_session(session.folder).scan("kv_cache_usage").collect().height == 3

    def test_a_bad_line_of_a_running_session_is_still_bad(self, tmp_path: Path) -> None:
        session = SessionBuilder(running_session(tmp_path))
        session.metadata(complete=False)
        session.usage((1, 40))
        session.append(USAGE, "1,2\n" + GOOD_ROW)
        assert f"{USAGE}, line 3: 2 fields instead of 10" in error_of(session)

    def test_a_session_that_has_only_its_journal_yet(self, tmp_path: Path) -> None:
        folder = running_session(tmp_path)
        summary = summarize(open_session(folder))
        assert summary.session.state == "running"
        assert summary.usage.combined is None

    def test_an_ended_session_is_completed_from_its_journal(self, tmp_path: Path) -> None:
        folder = ended_session(tmp_path)
        summary = summarize(open_session(folder))
        assert summary.session.state == "complete"
        assert summary.allocations.allocated.blocks == 4
        assert summary.usage.pools[0].end.held_blocks == 4
        assert not (folder / "journal").exists()

    def test_unless_it_is_to_be_left_alone(self, tmp_path: Path) -> None:
        folder = ended_session(tmp_path)
        opened = open_session(folder, complete=False)
        assert opened.state == "cut off"
        assert (folder / "journal").is_dir()
        assert not (folder / "metadata.json").exists()

    def test_what_cannot_be_completed_is_read_as_it_is(self, tmp_path: Path) -> None:
        folder = ended_session(tmp_path)
        session = SessionBuilder(folder)
        session.metadata(complete=False, ended_at=None)
        session.usage((1, 40), (3, 80))
        (folder / "journal" / "session.json").write_text("damaged")
        summary = summarize(open_session(folder))
        assert summary.session.state == "cut off"
        assert "could not be completed" in (summary.session.note or "")
        assert summary.usage.pools[0].mean_pct == 40

    def test_without_its_journal_it_is_read_as_it_is(self, tmp_path: Path) -> None:
        folder = ended_session(tmp_path)
        session = SessionBuilder(folder)
        session.metadata(complete=False, ended_at=None)
        session.usage((1, 40), (3, 80))
        session.append(USAGE, "4,90.00,90")
        shutil.rmtree(folder / "journal")
        summary = summarize(open_session(folder))
        assert summary.session.state == "cut off"
        assert "journal/ is missing" in (summary.session.note or "")
        assert summary.usage.pools[0].end.held_blocks == 80

    def test_an_ended_session_with_gaps_says_so(self, session: SessionBuilder) -> None:
        session.metadata(complete=False, dropped_events=12)
        session.usage((1, 40))
        summary = summarize(open_session(session.folder))
        assert summary.session.state == "cut off"
        assert "the record has gaps" in (summary.session.note or "")
        assert summary.warnings[0].startswith("12 events were dropped")
