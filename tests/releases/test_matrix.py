# SPDX-License-Identifier: Apache-2.0
"""The release matrix on the installed release: it finds that exact, and finds what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.vllm_matrix import check as matrix_check
from scripts.vllm_matrix import page
from scripts.vllm_matrix.check import Result, Verdict, check
from scripts.vllm_matrix.compare import differences
from scripts.vllm_matrix.facts import FACTS
from scripts.vllm_matrix.releases import QUICK, RELEASES, named

CASES = ("cached", "aborts", "reset", "parked", "connector", "partial", "pools")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix") / "installed"


@pytest.fixture(scope="module")
def result(scratch: Path) -> Result:
    """What comes of the installed release."""
    return check("installed", None, CASES, scratch)


def test_the_installed_release_is_exact(result: Result, scratch: Path) -> None:
    assert result.reasons == (), (scratch / "log").read_text()[-3000:]
    assert result.verdict is Verdict.EXACT
    assert result.cases == CASES
    # Otherwise this would show nothing.
    assert min(result.evictions, result.preemptions, result.reused) > 0


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ("kv_cache_allocations", "blocks of event"),
        ("kv_cache_evictions", "evicted blocks"),
        ("kv_cache_usage", "states of the pool"),
        ("scheduler_steps", "steps (tokens, requests)"),
    ],
)
def test_a_row_that_is_missing_is_found(
    result: Result, scratch: Path, tmp_path: Path, table: str, what: str
) -> None:
    session, seen = copy_of(scratch / "cached", tmp_path)
    path = session / f"{table}.csv"
    lines = path.read_text().splitlines(keepends=True)
    del lines[len(lines) // 2]
    path.write_text("".join(lines))
    found = list(differences(session, seen))
    assert any(line.startswith(what) for line in found), found


def test_a_wrong_number_of_a_request_is_found(
    result: Result, scratch: Path, tmp_path: Path
) -> None:
    session, seen = copy_of(scratch / "cached", tmp_path)
    for column in ("hit_tokens", "output_length", "preemptions"):
        path = session / "requests.jsonl"
        before = path.read_text()
        first, *others = before.splitlines()
        request = json.loads(first)
        request[column] += 1
        path.write_text("\n".join([json.dumps(request), *others]))
        (line,) = differences(session, seen)
        assert request["request_id"] in line
        path.write_text(before)


@pytest.mark.parametrize(
    ("break_it", "what"),
    [
        (lambda m: m["processes"][0].update(mismatches=1), "mismatches"),
        (lambda m: m["processes"][0]["hooks_missing"].update(engine="gone"), "hook engine: gone"),
        (lambda m: m.update(complete=False), "not complete"),
        (lambda m: m.update(dropped_events=2), "dropped events: 2"),
    ],
)
def test_what_metadata_says_is_found(
    result: Result,
    scratch: Path,
    tmp_path: Path,
    break_it: Callable[[dict[str, Any]], None],
    what: str,
) -> None:
    session, seen = copy_of(scratch / "cached", tmp_path)
    metadata = json.loads((session / "metadata.json").read_text())
    break_it(metadata)
    (session / "metadata.json").write_text(json.dumps(metadata))
    (line,) = differences(session, seen)
    assert what in line


def test_blocks_of_another_pool_are_found(result: Result, scratch: Path, tmp_path: Path) -> None:
    session, seen = copy_of(scratch / "pools", tmp_path)
    seen["pools"].reverse()
    found = list(differences(session, seen))
    assert any(line.startswith("evicted blocks of pool 1") for line in found), found


def test_loaded_tokens_that_are_missing_are_found(
    result: Result, scratch: Path, tmp_path: Path
) -> None:
    session, seen = copy_of(scratch / "connector", tmp_path)
    name = next(iter(seen["loaded"]))
    seen["loaded"][name] += 16
    (line,) = differences(session, seen)
    assert line.startswith("tokens loaded by the connector")
    assert line.endswith(name)


def test_a_session_that_never_began_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_check, "START_SECONDS", 0)
    monkeypatch.setattr(matrix_check, "COLLECT_SECONDS", 1e9)
    assert matrix_check._settled(tmp_path) is None
    # One without a collector.
    (tmp_path / "session_x" / "journal").mkdir(parents=True)
    assert matrix_check._settled(tmp_path) is None


def test_a_content_id_that_stands_for_two_contents_is_found(
    result: Result, scratch: Path, tmp_path: Path
) -> None:
    session, seen = copy_of(scratch / "cached", tmp_path)
    path = session / "requests.jsonl"
    requests = [json.loads(line) for line in path.read_text().splitlines()]
    requests[1]["hash_ids"][0] = requests[0]["hash_ids"][1]
    path.write_text("\n".join(map(json.dumps, requests)))
    (line,) = differences(session, seen)
    assert line.startswith("hash_ids: ")


def copy_of(case: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of a case's session, which the counts fit, and the counts."""
    (session,) = case.glob("session_*")
    seen = json.loads((case / "counts.json").read_text())
    assert list(differences(session, seen)) == []
    return shutil.copytree(session, folder / "session"), seen


def test_a_release_that_does_not_start_cannot_be_tried(tmp_path: Path) -> None:
    """Its error is the reason; the vLLM of the environment does not step in."""
    files = tmp_path / "files"
    (files / "vllm").mkdir(parents=True)
    (files / "vllm" / "__init__.py").write_text("raise RuntimeError('too old for this')\n")
    tried = check("0.0.1", files, CASES, tmp_path / "scratch")
    assert tried.verdict is Verdict.UNTRIED
    assert tried.reasons == ("RuntimeError: too old for this",)


def test_the_page_keeps_other_rows_and_text(tmp_path: Path) -> None:
    path = tmp_path / "releases.md"
    path.write_text(f"# Title\n\nText.\n\n{page._MARK}\n")
    page.update(Result("0.10.2", Verdict.EXACT, CASES, (), 5, 6, 7), path)
    page.update(Result("0.9.2", Verdict.UNTRIED, reasons=("no a|b",)), path)
    page.update(Result("0.10.2", Verdict.DEGRADED, CASES, ("cached: 1", "reset: 2"), 8, 6, 7), path)
    text = path.read_text()
    assert text.startswith("# Title\n\nText.\n")
    rows = [line for line in text.splitlines() if line.startswith("| 0.")]
    assert rows == [
        r"| 0.9.2 | cannot be tried | 0 | 0 | 0 | 0 | no a\|b |",
        f"| 0.10.2 | degraded | {len(CASES)} | 8 | 6 | 7 | cached: 1; reset: 2 |",
    ]


def test_the_page_says_what_changed_from_one_release_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "releases.md"
    path.write_text(f"Text.\n\n{page._MARK}\n")
    first, second, *_ = FACTS
    seen = {"0.9.2": ("a", "x"), "0.10.0": ("a", "y"), "0.10.2": ("b", "x")}
    page.update(Result("0.9.2", Verdict.EXACT), path)
    page.update_facts(
        [
            Result(
                version, Verdict.EXACT, facts=dict.fromkeys(FACTS, "") | {first: one, second: two}
            )
            for version, (one, two) in seen.items()
        ],
        path,
    )
    # Rows of releases come and go without these.
    page.update(Result("0.10.2", Verdict.EXACT), path)
    assert [line for line in path.read_text().splitlines() if first in line or second in line] == [
        f"| {first} | 0.10.0 | a | 0.10.2 | b |",
        f"| {second} | 0.9.2 | x | 0.10.0 | y |",
        f"| {second} | 0.10.0 | y | 0.10.2 | x |",
    ]
    for version, (one, two) in seen.items():
        assert page.facts_of(version, path) == {first: one, second: two}


def test_releases_are_in_order_and_quick_ones_among_them() -> None:
    numbers = [release.numbers for release in RELEASES]
    assert numbers == sorted(numbers)
    assert (numbers[0], numbers[-1]) == ((0, 8, 5), (0, 33, 0))
    assert [release.version for release in named(QUICK)] == list(QUICK)
    with pytest.raises(KeyError):
        named(["0.1.0"])
