# SPDX-License-Identifier: Apache-2.0
"""Sessions of one deployment on several hosts become one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis import open_session, summarize
from profilemate.format.marks import Mark, line
from tests.analysis.builder import SessionBuilder
from tests.analysis.invoke import invoke

DEPLOYMENT = "10.0.0.1:29550"
CLOCK = {
    "checkpoints": 9,
    "last_sec": 9.0,
    "least_drift_sec": 0.0,
    "most_drift_sec": 0.0,
    "error_sec": 0.001,
}
LATER_SEC = 2.5
"""The second host's session begins so much later."""


def of_host(
    folder: Path, name: str, rank: int, second: float = 0.0, **changes: Any
) -> SessionBuilder:
    """A session of 10 s of one host of a deployment, with an engine and a worker of this rank."""
    built = SessionBuilder(folder / name)
    begin, end = (f"2026-01-31T12:00:{at:09.6f}Z" for at in (second, second + 10))
    facts: dict[str, Any] = {
        "session_id": name,
        "started_at": begin,
        "ended_at": end,
        "deployment": DEPLOYMENT,
        "host": name,
        "clock": CLOCK,
        "content_ids_shared": True,
        "processes": [
            {"pid": 7, "role": role, "rank": rank, "hooks": [], "hooks_missing": {}}
            for role in ("engine", "worker")
        ],
        "gpus": [{"gpu": 0, "name": "NVIDIA H100", "total_bytes": 10**9, "workers": [rank]}],
    }
    built.metadata(**{**facts, **changes})
    built.usage((0, 10 + rank), (4, 20 + rank), engine=rank)
    built.requests(
        {
            "timestamp": 1000,
            "request_id": f"asked of {rank}",
            "engine": rank,
            "input_length": 32,
            "output_length": 4,
            "block_size": 16,
            "first_token_sec": 1.5,
            "queue_sec": 0.25,
            "finish_sec": 3.0 + rank,
            "finish_reason": "length",
        }
    )
    built.rows("gpu_memory.csv", {"gpu": 0, "used_bytes": 100 + rank, "free_bytes": 5})
    return built


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[SessionBuilder, SessionBuilder]:
    return of_host(tmp_path, "session_a", 0), of_host(tmp_path, "session_b", 1, LATER_SEC)


def join(*folders: Path, output: Path) -> Path:
    done = invoke("join", *folders, "-o", output)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(output)
    return output


def refused(*folders: Path, output: Path) -> str:
    done = invoke("join", *folders, "-o", output)
    assert done.returncode == 2
    assert not output.exists()
    assert list(output.parent.glob(".*joining")) == []
    (said,) = done.stderr.splitlines()
    return said


def test_rows_of_both_with_one_time(
    hosts: tuple[SessionBuilder, SessionBuilder], tmp_path: Path
) -> None:
    first, second = hosts
    (second.folder / "marks.jsonl").write_bytes(line(Mark(1.0, "here")))
    # The order in which they are named does not matter.
    folder = join(second.folder, first.folder, output=tmp_path / "joined")
    session = open_session(folder)
    usage = session.scan("kv_cache_usage").collect()
    assert list(zip(usage["timestamp_sec"], usage["engine"], usage["num_blocks"], strict=True)) == [
        (0.0, 0, 10),
        (LATER_SEC, 1, 11),
        (4.0, 0, 20),
        (4.0 + LATER_SEC, 1, 21),
    ]
    requests = session.scan("requests").collect()
    assert requests["request_id"].to_list() == ["asked of 0", "asked of 1"]
    assert requests["timestamp"].to_list() == [1000.0, 3500.0]
    assert requests["first_token_sec"].to_list() == [1.5, 4.0]
    assert requests["finish_sec"].to_list() == [3.0, 6.5]
    # A length is none of the moments.
    assert requests["queue_sec"].to_list() == [0.25, 0.25]
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600] * 5
    found = summarize(session)
    assert not [said for said in found.warnings if "tables are missing" in said]
    assert found.facts.engines == (0, 1)
    assert found.session.duration_sec == 12.5
    assert [(mark.at_sec, mark.text) for mark in found.session.marks] == [(3.5, "here")]
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["host"] == "session_a, session_b"
    assert [each["host"] for each in metadata["processes"]] == [
        *["session_a"] * 2,
        *["session_b"] * 2,
    ]


def test_the_summary_of_several_says_how_sure_the_times_are(
    hosts: tuple[SessionBuilder, SessionBuilder],
) -> None:
    folders = [one.folder for one in hosts]
    done = invoke("summary", "--no-replay", *folders)
    assert done.returncode == 0
    said = " ".join(done.stdout.split())
    assert "2 sessions of deployment '10.0.0.1:29550'" in said
    assert "agree to within 2 ms" in said
    asked = json.loads(invoke("summary", "--no-replay", "--json", *folders).stdout)
    assert asked["requests"]["ended"] == 2


@pytest.mark.parametrize(
    ("clock", "shift_sec", "error_sec"),
    [
        # The clock ran ahead by up to 2 ms: it is taken from the middle, and that is said.
        ({**CLOCK, "most_drift_sec": 0.002}, LATER_SEC + 0.001, 0.003),
        ({**CLOCK, "least_drift_sec": -0.004}, LATER_SEC - 0.002, 0.004),
        # Nothing keeps it in time.
        ({**CLOCK, "error_sec": None}, LATER_SEC, None),
        (None, LATER_SEC, None),
    ],
)
def test_clocks(
    tmp_path: Path, clock: dict[str, Any] | None, shift_sec: float, error_sec: float | None
) -> None:
    first = of_host(tmp_path, "session_a", 0)
    second = of_host(tmp_path, "session_b", 1, LATER_SEC, clock=clock)
    folder = join(first.folder, second.folder, output=tmp_path / "joined")
    said = json.loads((folder / "metadata.json").read_text())["joined"]
    assert said["parts"][1]["shift_sec"] == pytest.approx(shift_sec, abs=1e-6)
    assert said["error_sec"] == pytest.approx(error_sec)
    if error_sec is None:
        assert "how far their clocks are apart is not known" in (open_session(folder).note or "")


def test_ranks_that_two_hosts_have(tmp_path: Path) -> None:
    """Replicas of one deployment count from 0 each."""
    folders = [of_host(tmp_path, f"session_{name}", 0, at).folder for at, name in enumerate("abc")]
    folder = join(*folders, output=tmp_path / "joined")
    session = open_session(folder)
    assert summarize(session).facts.engines == (0, 1, 2)
    usage = session.scan("kv_cache_usage").collect()
    assert sorted(zip(usage["engine"], usage["timestamp_sec"], strict=True))[::2] == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]
    memory = session.scan("gpu_memory").collect()
    assert sorted(memory["gpu"].to_list()) == [0, 1, 2]
    metadata = json.loads((folder / "metadata.json").read_text())
    assert [(each["gpu"], each["workers"]) for each in metadata["gpus"]] == [
        (0, [0]),
        (1, [1]),
        (2, [2]),
    ]


def test_contents_compare_where_the_key_is_one(tmp_path: Path) -> None:
    for number, (one, other, is_shared) in enumerate(
        (("00" * 8, "00" * 8, True), ("00" * 8, "01" * 8, False), (None, None, False))
    ):
        base = tmp_path / str(number)
        first = of_host(base, "session_a", 0, contents_key=one)
        second = of_host(base, "session_b", 1, contents_key=other)
        folder = join(first.folder, second.folder, output=base / "joined")
        metadata = json.loads((folder / "metadata.json").read_text())
        assert metadata["content_ids_shared"] is is_shared
        assert metadata["contents_key"] == (one if is_shared else None)
        assert (metadata["contents_apart_because"] is None) is is_shared


def test_a_folder_of_sessions(hosts: tuple[SessionBuilder, SessionBuilder], tmp_path: Path) -> None:
    """Those of the newest one's deployment that ran at its time."""
    of_host(tmp_path, "session_20260131_115959_of_another", 0, deployment="other")
    of_host(
        tmp_path,
        "session_20260130_120000_of_before",
        0,
        started_at="2026-01-30T12:00:00Z",
        ended_at="2026-01-30T12:00:09Z",
    )
    folder = join(tmp_path, output=tmp_path.parent / f"{tmp_path.name}-joined")
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["session_id"] in ("session_a+session_b", "session_b+session_a")


def test_what_cannot_be_joined(tmp_path: Path) -> None:
    first = of_host(tmp_path, "session_a", 0).folder
    target = tmp_path / "joined"
    paused = [{"role": "engine", "rank": 1, "pauses": [[1.0, 2.0]]}]
    for name, changes, said in (
        ("other", {"deployment": "else"}, "join sessions of one deployment"),
        ("unnamed", {"deployment": None}, "VLLM_PROFILING_DEPLOYMENT"),
        ("timeless", {"started_at": None}, "does not say when it began"),
        ("paused", {"processes": paused}, "was paused"),
        ("later", {"started_at": "2026-02-01T12:00:00Z"}, "join the sessions of one run"),
    ):
        other = of_host(tmp_path, f"session_{name}", 1, **changes).folder
        assert said in refused(first, other, output=target)
    assert "is named twice" in refused(first, first, output=target)
    assert "is the only session" in refused(first, output=target)
    target.mkdir()
    done = invoke("join", first, first, "-o", target)
    assert (done.returncode, "is there already" in done.stderr) == (2, True)
