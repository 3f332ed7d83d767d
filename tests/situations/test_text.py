# SPDX-License-Identifier: Apache-2.0
"""Text that a client controls: whatever a request is called, the tables stay tables."""

from __future__ import annotations

import csv
import json
import unicodedata
from pathlib import Path

import pandas
import polars
import pytest

import analysis
from tests.situations.bench import Bench, Tables
from tests.support.scheduler import tokens

NAMES = {
    # What the client sends, and what stands in the cell.
    'say "hi", then go': 'say "hi", then go',
    '"': '"',
    "comma,comma": "comma,comma",
    "two\r\nlines": r"two\x0d\x0alines",
    "=cmd|'/C calc'!A0": "'=cmd|'/C calc'!A0",
    "+1": "'+1",
    "-1": "'-1",
    "@SUM(A1)": "'@SUM(A1)",
    "\t=1": r"\x09=1",
    "\r=1": r"\x0d=1",
    " =1": "' =1",
    "\u3000\u00a0+1": "'\u3000\u00a0+1",
    "\uff1d1": "'\uff1d1",
    "\uff0b1": "'\uff0b1",
    "\uff0d1": "'\uff0d1",
    "\uff20A1": "'\uff20A1",
    "\ufe66\ufe62\ufe63\ufe6b": "'\ufe66\ufe62\ufe63\ufe6b",
    "\u22121": "'\u22121",
    "\u200b=1": r"\u200b=1",
    "nul\0bell\a": r"nul\x00bell\x07",
    "héllo-世界-🙂": "héllo-世界-🙂",
    "line\u2028separator": r"line\u2028separator",
    "bidi\u202etext": r"bidi\u202etext",
    "\u2066isolated\u2069\u200e\u061c": r"\u2066isolated\u2069\u200e\u061c",
    "c1\x9b31m\x85": r"c1\x9b31m\x85",
    " spaces ": " spaces ",
    "\ufeffmark": r"\ufeffmark",
    "half \ud83d of a pair": r"half \ud83d of a pair",
    "x" * 10_000: "x" * 10_000,
}

CSV_TABLES = {
    "kv_cache_usage": (),
    "kv_cache_allocations": ("request_id",),
    "kv_cache_evictions": ("owner_request", "evicting_request"),
    "prefix_cache_lookups": ("request_id",),
    "scheduler_steps": (),
}


@pytest.fixture
def tables(bench: Bench) -> Tables:
    """A session of requests with all of those names, which evict each other's blocks."""
    engine = bench.engine(10)
    for number, name in enumerate(NAMES):
        engine.run(bench.request(name, tokens(number, 64), 1))
    return engine.end()


def test_python_pandas_and_polars_read_the_same_from_every_table(tables: Tables) -> None:
    """Same rows, same names, whoever reads them; and a line a row, for tail and grep."""
    for table, columns in CSV_TABLES.items():
        path = tables.folder / f"{table}.csv"
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file, strict=True)
        assert {len(row) for row in rows} == {len(header)}
        assert path.read_bytes().count(b"\n") == len(rows) + 1
        by_pandas = pandas.read_csv(path, keep_default_na=False)
        by_polars = polars.read_csv(path)
        assert list(by_pandas.columns) == by_polars.columns == header
        assert len(by_pandas) == by_polars.height == len(rows)
        for column in columns:
            cells = [row[header.index(column)] for row in rows]
            assert list(by_pandas[column]) == by_polars[column].fill_null("").to_list() == cells
            assert set(cells) - {""} <= set(NAMES.values())
    named = tables.select("prefix_cache_lookups", "request_id")
    assert [str(name) for (name,) in named] == list(NAMES.values())


def test_no_cell_is_a_formula_and_none_holds_a_control_character(tables: Tables) -> None:
    for table in CSV_TABLES:
        with (tables.folder / f"{table}.csv").open(newline="", encoding="utf-8") as file:
            for row in csv.reader(file):
                for cell in row:
                    begin = unicodedata.normalize("NFKC", cell).lstrip()
                    assert not begin.startswith(("=", "+", "-", "@", "\u2212"))
                    for character in cell:
                        assert unicodedata.category(character) not in ("Cc", "Cf", "Zl", "Zp")


def test_the_json_lines_hold_the_names_as_they_were_sent(tables: Tables) -> None:
    """JSON holds every name but half a surrogate pair, which is written as in the tables."""
    lines = (tables.folder / "requests.jsonl").read_text().splitlines()
    names = [json.loads(line)["request_id"] for line in lines]
    assert names == [r"half \ud83d of a pair" if "\ud83d" in name else name for name in NAMES]
    found = analysis.summarize(analysis.open_session(tables.folder))
    assert found.requests.ended == len(NAMES)
    assert found.prefix_cache.true.requests == len(NAMES)


def test_a_name_of_ten_kilobytes_is_not_repeated_a_thousand_times(
    bench: Bench, tmp_path: Path
) -> None:
    """It stands in each of its rows, of which there are few however long the request waits."""
    engine = bench.engine(3)
    engine.add(bench.request("x" * 10_000, tokens(1, 64), 1))
    engine.step(5000, seconds=0.001)
    tables = engine.end()
    size = (tables.folder / "prefix_cache_lookups.csv").stat().st_size
    assert 10_000 < size < 10 * 10_100
