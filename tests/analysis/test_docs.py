# SPDX-License-Identifier: Apache-2.0
"""The documentation's example rows are a session, and its snippets run on it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from analysis import open_session, summarize
from tests.analysis.builder import COLUMNS, SessionBuilder

DOCS = Path(__file__).parent.parent.parent / "docs"
SECTIONS = {
    section.partition("\n")[0]: section
    for section in (DOCS / "tables.md").read_text().split("\n## ")[1:]
}


def code(section: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


@pytest.fixture
def documented(session: SessionBuilder) -> SessionBuilder:
    for table, section in SECTIONS.items():
        for example in code(section, "csv") + code(section, "json"):
            session.append(table, example)
    return session


def test_every_column_is_documented_in_its_place() -> None:
    for table, header in COLUMNS.items():
        section = SECTIONS[table]
        assert code(section, "csv")[0].splitlines()[0] == header
        rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section, re.MULTILINE)
        assert re.findall(r"\w+", " ".join(rows)) == header.split(",")


def test_every_field_of_a_request_is_documented() -> None:
    section = SECTIONS["requests.jsonl"]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section, re.MULTILINE)
    fields = re.findall(r"\w+", " ".join(rows))
    assert re.findall(r'"(\w+)":', code(section, "json")[0]) == fields


def test_the_example_rows_are_a_session(documented: SessionBuilder) -> None:
    summary = summarize(open_session(documented.folder))
    assert summary.usage.pools[0].peak_pct == 55.06
    assert summary.allocations.allocated.blocks == 27
    assert summary.evictions.total.blocks == 1
    assert summary.prefix_cache.true.hit_tokens == 1008
    assert summary.requests.by_reason == {"stop": 1}


def test_the_snippets_run(documented: SessionBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    monkeypatch.chdir(documented.folder)
    exec("import pandas as pd", names)
    for section in SECTIONS.values():
        for snippet in code(section, "python"):
            exec(snippet, names)
    table = names["pd"].read_csv(documented.folder / "kv_cache_evictions.csv")
    assert table["lifetime_sec"].mean() == 7.120934
