# SPDX-License-Identifier: Apache-2.0
"""A session that begins in the midst of its run is replayed with an empty cache: that is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import large_session
from tests.analysis.invoke import invoke
from tests.support import segments

SAID = "begin in the midst of the run, and each replay with an empty cache"


@pytest.fixture
def session(tmp_path: Path) -> Path:
    folder = tmp_path / "session_20260131_120000_4711_c0ffee"
    large_session.write(folder, 2_000)
    segments.cut_at(folder, 600, 1200)
    return folder


def said(session: Path, *options: str) -> str:
    result = invoke("whatif", session, *options)
    assert result.returncode == 0
    return " ".join(result.stdout.split())


@pytest.mark.parametrize("options", [["--fast"], ["--blocks", "100", "--step-ms", "1"]])
def test_what_was_removed_is_missing_in_the_cache(session: Path, options: list[str]) -> None:
    assert SAID not in said(session, *options)
    segments.remove_before(session, 2)
    assert SAID in said(session, *options)
    assert any(SAID in note for note in json.loads(said(session, *options, "--json"))["notes"])


def test_so_is_what_came_before_a_pause(session: Path) -> None:
    metadata = json.loads((session / "metadata.json").read_text())
    metadata["processes"] = [{"role": "engine", "rank": 0, "pauses": [[1000.0, 1100.0]]}]
    (session / "metadata.json").write_text(json.dumps(metadata))
    assert SAID in said(session, "--fast")
    assert SAID not in said(session, "--fast", "--period", "1")
