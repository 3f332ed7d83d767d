# SPDX-License-Identifier: Apache-2.0
"""Damaged segments: each is named in one line, and none takes over memory or time."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis import SessionError, open_session, summarize
from analysis.tables import unpacking
from tests.analysis.builder import COLUMNS, SessionBuilder
from tests.analysis.invoke import invoke
from tests.analysis.test_session import error_of
from tests.support import segments

USAGE = "kv_cache_usage.csv"
STEPS = "scheduler_steps.csv"


@pytest.fixture
def cut(session: SessionBuilder) -> SessionBuilder:
    """A session of 9 s in three segments and an open one, with two rows of usage in each."""
    session.usage(*((number, 10 * number) for number in range(1, 9)))
    session.requests(*({"timestamp": 1000 * number, "request_id": "a"} for number in range(8)))
    cuts = [segments.by_share(session.folder, number / 4) for number in (1, 2, 3)]
    segments.split(session.folder, *cuts, times=(3, 5, 7))
    return session


def packed(session: SessionBuilder, number: int, file: str = USAGE) -> Path:
    stem, _, kind = file.rpartition(".")
    folder = session.folder / "segments" / f"{number:04d}"
    return folder / f"{stem}.{number:04d}.{kind}.gz"


def repack(path: Path, plain: bytes, **claims: Any) -> None:
    """Put this text into a packed file, and into the index what is claimed of it."""
    path.write_bytes(gzip.compress(plain, 1))
    known = {"plain_bytes": len(plain), "crc32": f"{zlib.crc32(plain):08x}", **claims}
    segments.change(path.parent, lambda index: index["tables"][path.name].update(known))


def times(session: SessionBuilder) -> list[float]:
    """Of all rows of a table."""
    batches = open_session(session.folder).batches("kv_cache_usage", ["timestamp_sec"])
    return [time for batch in batches for time in batch["timestamp_sec"]]


@pytest.fixture(params=["zlib", "isal.isal_zlib"])
def unpacker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """isal is not there on each machine."""
    monkeypatch.setattr(unpacking, "_ZLIB", pytest.importorskip(request.param))


@pytest.mark.usefixtures("unpacker")
class TestPackedFiles:
    def test_cut_short(self, cut: SessionBuilder) -> None:
        path = packed(cut, 2)
        whole = path.read_bytes()
        for length in (0, 5, len(whole) // 2, len(whole) - 8, len(whole) - 1):
            path.write_bytes(whole[:length])
            assert f"{path} is damaged: it is cut short; restore" in error_of(cut)

    def test_any_bit_that_flips_is_found(self, cut: SessionBuilder) -> None:
        """But for those that say nothing of the text: in the head, and behind the last byte."""
        path = packed(cut, 2)
        whole = path.read_bytes()
        expected = times(cut)
        harmless = 0
        for bit in range(8 * len(whole)):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            try:
                assert times(cut) == expected
                harmless += 1
            except SessionError as error:
                assert str(error).startswith(f"{path} is damaged: "), bit  # noqa: PT017
        # When, where, how fast and from what it was packed, and the rest of a byte.
        assert harmless <= 8 * (4 + 1 + 1 + 1) + 7

    def test_something_behind_its_end(self, cut: SessionBuilder) -> None:
        path = packed(cut, 2)
        path.write_bytes(path.read_bytes() * 2)
        assert f"{path} is damaged: something follows its end" in error_of(cut)

    def test_another_file_in_its_place(self, cut: SessionBuilder) -> None:
        path = packed(cut, 2)
        plain = gzip.decompress(path.read_bytes())
        path.write_bytes(gzip.compress(plain.replace(b"30.00,30", b"31.00,31"), 1))
        assert f"{path} is damaged: its checksum is not the one in the index" in error_of(cut)

    @pytest.mark.parametrize("more", [-1, 1, 10**9])
    def test_another_length_than_the_index_says(self, cut: SessionBuilder, more: int) -> None:
        path = packed(cut, 2)
        segments.change(
            path.parent,
            lambda index: index["tables"][path.name].update(
                plain_bytes=index["tables"][path.name]["plain_bytes"] + more
            ),
        )
        assert f"{path} is damaged: it unpacks to " in error_of(cut)

    def test_the_text_is_what_was_packed(self, cut: SessionBuilder) -> None:
        assert times(cut) == list(range(1, 9))

    def test_that_is_missing(self, cut: SessionBuilder) -> None:
        packed(cut, 2).unlink()
        assert error_of(cut).startswith(f"cannot read {packed(cut, 2)}: No such file")

    @pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
    def test_that_is_none(self, cut: SessionBuilder, kind: str, tmp_path: Path) -> None:
        path = packed(cut, 2)
        elsewhere = path.rename(tmp_path / "elsewhere")
        make: dict[str, Callable[[], object]] = {
            "link": lambda: path.symlink_to(elsewhere),
            "folder": path.mkdir,
            "pipe": lambda: os.mkfifo(path),
        }
        make[kind]()
        assert error_of(cut).startswith(f"cannot read {path}: ")


class TestLines:
    def test_a_bad_line_is_named_by_its_number_in_the_text(self, cut: SessionBuilder) -> None:
        path = packed(cut, 2)
        repack(path, gzip.decompress(path.read_bytes()).replace(b"40.00", b"forty"))
        said = error_of(cut)
        assert f"{path}, line 3: usage_pct is 'forty', not a number; restore the recorded" in said

    def test_a_request_that_is_none(self, cut: SessionBuilder) -> None:
        path = packed(cut, 3, "requests.jsonl")
        repack(path, gzip.decompress(path.read_bytes()) + b"[1]\n")
        assert f"{path}, line 3: not a JSON object" in error_of(cut)

    @pytest.mark.usefixtures("small_chunks")
    @pytest.mark.parametrize("number", [2, 3, None])
    def test_a_row_that_is_earlier_than_one_in_a_file_before(
        self, cut: SessionBuilder, number: int | None
    ) -> None:
        path = cut.folder / USAGE if number is None else packed(cut, number)
        plain = path.read_bytes() if number is None else gzip.decompress(path.read_bytes())
        first = plain.splitlines()[1]
        plain = plain.replace(first, b"0.5," + first.partition(b",")[2], 1)
        path.write_bytes(plain) if number is None else repack(path, plain)
        assert (
            f"{path}, line 2: timestamp_sec is 0.500000, but an earlier row of the engine and pool"
        ) in error_of(cut)

    def test_numbers_that_do_not_rise_from_file_to_file(self, session: SessionBuilder) -> None:
        steps = (1, 2, 3, 3)
        session.rows(STEPS, *({"timestamp_sec": n, "step": step} for n, step in enumerate(steps)))
        segments.split(session.folder, {STEPS: 2}, {STEPS: 3})
        assert f"{session.folder / STEPS}, line 2: step is 3, but the row of" in error_of(session)

    @pytest.mark.parametrize("file", [USAGE, "requests.jsonl"])
    def test_a_line_of_a_gigabyte(self, cut: SessionBuilder, file: str) -> None:
        """Packed, it is a megabyte. It fills no memory, and its length is what is said of it."""
        path, size = packed(cut, 2, file), 1 << 30
        before = gzip.decompress(path.read_bytes())
        packer = zlib.compressobj(1, wbits=31)
        crc, zeros = zlib.crc32(before), bytes(1 << 20)
        with open(path, "wb") as out:
            out.write(packer.compress(before))
            for _ in range(size >> 20):
                crc = zlib.crc32(zeros, crc)
                out.write(packer.compress(zeros))
            out.write(packer.flush())
        claims = {"plain_bytes": len(before) + size, "crc32": f"{crc:08x}"}
        segments.change(path.parent, lambda index: index["tables"][path.name].update(claims))
        tracemalloc.start()
        said = error_of(cut)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        line = 4 if file == USAGE else 3
        assert f"{path}, line {line}: longer than" in said
        assert peak < 300 << 20

    @pytest.mark.parametrize(
        "header", ["timestamp_sec,used\n", COLUMNS[USAGE].replace("num", "no")]
    )
    def test_another_header(self, cut: SessionBuilder, header: str) -> None:
        path = packed(cut, 2)
        repack(path, header.encode().ljust(40, b"\n"))
        assert f"{path}, line 1: " in error_of(cut)

    def test_a_file_of_a_newer_release_has_more_columns(self, cut: SessionBuilder) -> None:
        path = packed(cut, 3)
        header, *rows = gzip.decompress(path.read_bytes()).splitlines()
        repack(path, b"\n".join([header + b",more", *(row + b",x" for row in rows), b""]))
        assert open_session(cut.folder).scan("kv_cache_usage").collect().height == 8

    def test_the_last_one_may_lack_its_end(self, cut: SessionBuilder) -> None:
        path = packed(cut, 2)
        repack(path, gzip.decompress(path.read_bytes())[:-1])
        assert times(cut) == list(range(1, 9))

    def test_few_lines_of_many_files_are_read_together(self, cut: SessionBuilder) -> None:
        batches = list(open_session(cut.folder).batches("kv_cache_usage", ["timestamp_sec"]))
        assert [batch.height for batch in batches] == [6, 2]  # Packed ones, and the open one.


class TestIndex:
    @pytest.mark.parametrize(
        ("text", "says"),
        [
            (None, "it is missing"),
            ("", "it is not JSON"),
            ("[" * 10**5, "it is not JSON"),
            ("[]", "it is not a JSON object"),
            ("{}", "its format_version is 'None'"),
            ('{"format_version": 2}', "its format_version is '2'"),
            ('{"format_version": 1, "begin_sec": NaN}', "it is not JSON"),
            (" " * (1 << 20) + "{}", "it is larger than 1 MiB"),
        ],
    )
    def test_that_cannot_be_read(self, cut: SessionBuilder, text: str | None, says: str) -> None:
        path = cut.folder / "segments" / "0002" / "segment.json"
        path.unlink()
        if text is not None:
            path.write_text(text)
        assert error_of(cut) == f"{path}: {says}" + error_of(cut).removeprefix(f"{path}: {says}")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("begin_sec", None),
            ("begin_sec", -1),
            ("end_sec", "1"),
            ("end_sec", 1e11),
            ("tables", []),
            ("tables", None),
            ("tables", {"kv_cache_usage.0002.csv.gz": 1}),
        ],
    )
    def test_of_another_kind(self, cut: SessionBuilder, key: str, value: Any) -> None:
        folder = cut.folder / "segments" / "0002"
        segments.change(folder, lambda index: index.update({key: value}))
        assert error_of(cut).startswith(f"{folder / 'segment.json'}: ")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("plain_bytes", -1),
            ("plain_bytes", 1.5),
            ("plain_bytes", 10**13),
            ("crc32", 7),
            ("crc32", "xyz"),
            ("last_sec", "now"),
        ],
    )
    def test_that_says_nonsense_of_a_file(self, cut: SessionBuilder, key: str, value: Any) -> None:
        path = packed(cut, 2)
        segments.change(path.parent, lambda index: index["tables"][path.name].update({key: value}))
        assert error_of(cut).startswith(f"{path.parent / 'segment.json'}: {key} ")

    @pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
    def test_that_is_no_file(self, cut: SessionBuilder, kind: str, tmp_path: Path) -> None:
        path = cut.folder / "segments" / "0002" / "segment.json"
        elsewhere = path.rename(tmp_path / "elsewhere")
        make: dict[str, Callable[[], object]] = {
            "link": lambda: path.symlink_to(elsewhere),
            "folder": path.mkdir,
            "pipe": lambda: os.mkfifo(path),
        }
        make[kind]()
        assert error_of(cut).startswith(f"cannot read {path}: ")


class TestFolders:
    def test_one_in_the_middle_is_missing(self, cut: SessionBuilder) -> None:
        shutil.rmtree(cut.folder / "segments" / "0002")
        missing = cut.folder / "segments" / "0002"
        assert f"{missing} is missing, and 0003 is there" in error_of(cut)

    def test_one_before_the_one_that_is_being_closed_is_missing(self, cut: SessionBuilder) -> None:
        (cut.folder / "segments" / ".closing-0005").mkdir()
        missing = cut.folder / "segments" / "0004"
        assert f"{missing} is missing, and 0005 is there" in error_of(cut)

    @pytest.mark.parametrize(
        "name",
        ["1", "001", "00004", "0000", "4", "\u0661\u0662\u0663\u0664", ".new-0004", "a", ".0001"],
    )
    def test_names_that_are_none(self, cut: SessionBuilder, name: str) -> None:
        before = summarize(open_session(cut.folder))
        shutil.copytree(cut.folder / "segments" / "0002", cut.folder / "segments" / name)
        assert summarize(open_session(cut.folder)) == before

    @pytest.mark.parametrize("name", ["segments", "segments/0002", "segments/.closing-0004"])
    def test_links_are_not_followed(self, cut: SessionBuilder, name: str, tmp_path: Path) -> None:
        path, elsewhere = cut.folder / name, tmp_path / "elsewhere"
        if path.exists():
            path.rename(elsewhere)
        else:
            elsewhere.mkdir()
        path.symlink_to(elsewhere)
        said = error_of(cut)
        assert said.startswith(f"{path} is ")
        assert "\n" not in said

    def test_a_file_in_place_of_all(self, cut: SessionBuilder) -> None:
        shutil.rmtree(cut.folder / "segments")
        (cut.folder / "segments").write_text("")
        assert error_of(cut) == f"cannot read {cut.folder / 'segments'}: Not a directory"

    def test_more_than_four_digits(self, session: SessionBuilder) -> None:
        session.usage(*((number, 10) for number in range(1, 5)))
        segments.split(session.folder, {USAGE: 1}, {USAGE: 2}, {USAGE: 3})
        folder = session.folder / "segments"
        for old, new in ((1, 9998), (2, 9999), (3, 10000)):
            target = (folder / f"{old:04d}").rename(folder / f"{new:04d}")
            name = f"kv_cache_usage.{new:04d}.csv.gz"
            (target / f"kv_cache_usage.{old:04d}.csv.gz").rename(target / name)
            segments.change(
                target,
                lambda index, name=name: index.update(  # type: ignore[misc]
                    tables={name: next(iter(index["tables"].values()))}
                ),
            )
        opened = open_session(session.folder)
        assert opened.scan("kv_cache_usage", history=True).collect()["timestamp_sec"].to_list() == [
            *(1, 2, 3, 4)
        ]
        assert opened.window is not None
        assert opened.window.removed_segments == 9997


def test_bytes_that_are_missing_are_noticed(cut: SessionBuilder) -> None:
    written = sum(
        entry["plain_bytes"]
        for index in (cut.folder / "segments").glob("*/segment.json")
        for name, entry in json.loads(index.read_text())["tables"].items()
        if not name.startswith("opening.")
    )
    written += sum((cut.folder / file).stat().st_size for file in (USAGE, "requests.jsonl"))
    cut.metadata(cost={"table_bytes": written})
    assert not is_said_to_lack_bytes(cut)
    segments.remove_before(cut.folder, 2)
    assert not is_said_to_lack_bytes(cut)
    shutil.rmtree(cut.folder / "segments" / "0003")
    assert is_said_to_lack_bytes(cut)
    result = invoke("check", cut.folder, "--fail-if", "evictions>0")
    assert result.returncode == 2
    assert "bytes of tables, and" in result.stderr


def is_said_to_lack_bytes(session: SessionBuilder) -> bool:
    warnings = summarize(open_session(session.folder)).warnings
    return any("bytes of tables, and" in warning for warning in warnings)
