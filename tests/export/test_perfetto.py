# SPDX-License-Identifier: Apache-2.0
"""A session as a trace: every table's figures, read back from the packets."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from analysis import open_session, summarize
from tests.analysis import graphs, stories
from tests.analysis.builder import SessionBuilder
from tests.analysis.conftest import session as session
from tests.analysis.invoke import invoke
from tests.analysis.test_cli import assert_fails
from tests.export.reading import Read, read

BEGAN_NS = 1769860800 * 10**9
"""2026-01-31T12:00:00Z, second 0 of a built session."""
SEC = 10**9


def exported(session: SessionBuilder, *options: object) -> Read:
    target = session.folder.parent / "out.pftrace"
    done = invoke("export", "perfetto", session.folder, "-o", target, *options)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{target}\n")
    return read(target)


def test_the_trace_has_the_summarys_figures(session: SessionBuilder) -> None:
    stories.swept(session)
    session.rows(
        "scheduler_steps.csv",
        {"timestamp_sec": 1.5, "step": 1, "scheduled_tokens": 50, "prefill_tokens": 50}
        | {"decode_tokens": 0, "scheduled_reqs": 1, "schedule_us": 250},
        {"timestamp_sec": 1.6, "step": 2, "scheduled_tokens": 51, "prefill_tokens": 50}
        | {"decode_tokens": 1, "scheduled_reqs": 2, "schedule_us": 100},
        {"timestamp_sec": 1.7, "step": 3, "scheduled_tokens": 1, "prefill_tokens": 0}
        | {"decode_tokens": 1, "scheduled_reqs": 1, "schedule_us": 100, "preempted_reqs": 1},
        {"timestamp_sec": 1.8, "step": 4, "scheduled_tokens": 0, "prefill_tokens": 0}
        | {"decode_tokens": 0, "scheduled_reqs": 0, "schedule_us": 10, "repeats": 7},
    )
    found = exported(session)
    summary = summarize(open_session(session.folder))
    requests = found.named("request")
    assert len(requests) == summary.requests.ended == 5
    sums = ("input_length", "output_length", "hit_tokens")
    assert [sum(one.args[name] for one in requests) for name in sums] == [
        summary.requests.input_tokens,
        summary.requests.output_tokens,
        summary.prefix_cache.true.hit_tokens,
    ]
    assert sum(one.args["blocks"] for one in found.named("evicted")) == (
        summary.evictions.total.blocks
    )
    steps = found.under("Engine 0", "Steps")
    assert [one.name for one in steps] == ["prefill", "mixed", "decode", "idle"]
    assert sum(one.args["repeats"] for one in steps) == summary.preemptions.steps == 10
    assert sum(one.args["preempted_reqs"] for one in steps) == summary.preemptions.count == 1
    tokens = sum(one.args["prefill_tokens"] + one.args["decode_tokens"] for one in steps)
    assert tokens == summary.preemptions.scheduled_tokens
    assert [one.end_ns - one.begin_ns for one in steps] == [250_000, 100_000, 100_000, 10_000]


def test_blame_is_an_arrow_from_whom_it_was_taken_to_who_took_it(session: SessionBuilder) -> None:
    stories.swept(session)
    arrows = exported(session).arrows
    told = [
        (one.track[-1], one.name, one.args["blocks"], one.args["by"], other.track[-1], other.name)
        for one, other in arrows
    ]
    assert told == [
        ("A2", "evicted", 2, "S", "S", "evicts"),
        ("gone", "evicted", 1, "S", "S", "evicts"),
        ("S", "evicted", 1, "B", "B", "evicts"),
        ("B", "evicted", 1, "C", "C", "evicts"),
    ]
    first = arrows[0][0]
    assert first.args["mean_idle_sec"] == 0.5
    assert arrows[0][1].args == {"owner": "A2", "blocks": 2}
    assert first.begin_ns == BEGAN_NS + 3_001_000_000
    with_copies = [one.args["with_copies"] for one, _ in arrows]
    assert with_copies == [0, 0, 0, 1]


def test_what_nobody_took_and_nobody_owned_has_a_track(session: SessionBuilder) -> None:
    session.evictions({"timestamp_sec": 2, "reason": "reset"})
    (one,) = exported(session).named("evicted")
    assert one.track == ("Engine 0", "Evictions")
    assert one.args["reason"] == "reset"
    assert "by" not in one.args


def test_times_are_of_the_wall_clock(session: SessionBuilder) -> None:
    stories.swept(session)
    found = exported(session)
    assert found.wall_ns == BEGAN_NS
    began = {one.track[-1]: one.begin_ns - BEGAN_NS for one in found.named("request")}
    assert began == {"A": SEC, "A2": 5 * SEC // 2, "S": 3 * SEC, "B": 5 * SEC, "C": 8 * SEC}
    ended = {one.track[-1]: one.end_ns - BEGAN_NS for one in found.named("request")}
    assert ended["A2"] == 11 * SEC // 4


def test_without_a_wall_clock_times_begin_with_the_session(session: SessionBuilder) -> None:
    session.metadata(started_at=None)
    session.rows(
        "scheduler_steps.csv",
        {"timestamp_sec": 0.0001, "step": 1, "scheduled_tokens": 1, "prefill_tokens": 1}
        | {"decode_tokens": 0, "scheduled_reqs": 1, "schedule_us": 250},
    )
    (step,) = exported(session).under("Engine 0", "Steps")
    assert (step.begin_ns, step.end_ns) == (0, 100_000)


def test_phases_without_lookups_are_those_of_the_request(session: SessionBuilder) -> None:
    """A request that was never admitted is queued until its end."""
    _, row = stories.request("A", 1, 2, 50, [1, 2, 3], 0)
    session.requests(
        row | {"queue_sec": 0.25},
        row | {"request_id": "left", "queue_sec": None, "first_token_sec": None},
    )
    found = exported(session)
    told = [
        (one.track[-1], one.name, one.begin_ns - BEGAN_NS, one.end_ns - BEGAN_NS)
        for one in found.slices
        if one.depth
    ]
    assert told == [
        ("A", "queued", SEC, 5 * SEC // 4),
        ("left", "queued", SEC, 2 * SEC),
        ("A", "prefill", 5 * SEC // 4, 3 * SEC // 2),
        ("A", "decode", 3 * SEC // 2, 2 * SEC),
    ]


def test_the_pool_is_written_where_it_changed(session: SessionBuilder) -> None:
    session.usage((1, 10), (2, 10), (3, 40))
    found = exported(session)
    pool = ("Engine 0", "Pool 0")
    assert found.counters[(*pool, "held")] == [(BEGAN_NS + SEC, 10), (BEGAN_NS + 3 * SEC, 40)]
    assert found.counters[(*pool, "cached")][-1][1] == 40
    assert found.counters[(*pool, "free")][-1][1] == 20
    assert found.units[(*pool, "held")] == "blocks"
    assert found.counters["Engine 0", "Running and waiting", "running"] == [(BEGAN_NS + SEC, 1)]


def test_graphs_and_memory_of_a_gpu(session: SessionBuilder) -> None:
    graphs.on_the_gpu(session)
    found = exported(session)
    summary = summarize(open_session(session.folder)).cuda_graphs
    assert summary is not None
    captured = [one for one in found.slices if one.track[-1] == "Captures"]
    kept = [one for one in captured if one.args["kind"] == "capture"]
    assert len(kept) == 9
    assert len(captured) == 10
    executed = [one for one in found.slices + found.instants if one.track[-1] == "Executions"]
    served = [one for one in executed if not one.args["dummy"]]
    assert len(served) == 28
    assert sum(one.args["unpadded_tokens"] for one in served if one.track[0] == "Worker 0") == 128
    assert sum(one.name == "eager" for one in executed) == 6
    assert sum(one.args.get("gpu_us", 0) for one in executed) == 4 * 300
    used = found.counters["GPU 0", "memory used"]
    assert [value >> 30 for _, value in used] == [70, 72]
    assert found.units["GPU 0", "memory used"] == "bytes"


def test_a_window_has_what_is_in_it_and_whole_requests(session: SessionBuilder) -> None:
    stories.swept(session)
    session.usage((2.5, 10), (4, 20))
    found = exported(session, "--window", "2.7s:4s")
    assert [one.track[-1] for one in found.named("request")] == ["A2", "S"]
    assert found.named("request")[0].begin_ns == BEGAN_NS + 5 * SEC // 2
    assert sum(one.args["blocks"] for one in found.named("evicted")) == 3
    assert not found.counters
    assert found.wall_ns == BEGAN_NS + 2_700_000_000


def test_chosen_requests_and_what_was_evicted_by_them_or_of_them(session: SessionBuilder) -> None:
    stories.swept(session)
    found = exported(session, "--requests", "A2, C")
    assert [one.track[-1] for one in found.named("request")] == ["A2", "C"]
    assert [one.track[-1] for one in found.named("evicted")] == ["A2", "B"]


def test_marks_are_instants(session: SessionBuilder) -> None:
    (session.folder / "marks.jsonl").write_text(
        json.dumps({"timestamp_sec": 2, "text": "deployed"}) + "\n"
    )
    (one,) = exported(session).named("deployed")
    assert (one.track, one.begin_ns) == (("Marks",), BEGAN_NS + 2 * SEC)


def test_numbers_of_texts_are_forgotten_now_and_then(
    session: SessionBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stories.swept(session)
    whole = exported(session)
    assert whole.cleared == 1
    monkeypatch.setattr("analysis.export.perfetto.packets._TEXTS", 12)
    monkeypatch.setattr("analysis.export.perfetto.packets._BATCH", 3)
    again = exported(session)
    assert again.cleared > 3
    assert (again.slices, again.instants) == (whole.slices, whole.instants)


def test_the_file_is_there_whole_or_not_at_all(session: SessionBuilder) -> None:
    stories.swept(session)
    target = session.folder / "trace.pftrace"
    assert invoke("export", "perfetto", session.folder).stdout == f"{target}\n"
    before = target.read_bytes()
    assert target.stat().st_mode & 0o777 == 0o600
    session.append("kv_cache_evictions.csv", "x\n")
    assert_fails(invoke("export", "perfetto", session.folder), "kv_cache_evictions.csv, line 7")
    assert target.read_bytes() == before
    assert not list(session.folder.glob(".trace*"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--requests", "A,nobody"), "has no request 'nobody' that ended, and none whose id"),
        (("--window", "11s:12s"), "it ended after 10 s, and the window begins at 11 s"),
        (("-o", "/dev/null"), "it is a device or a pipe"),
        (("--torch", "nowhere.json"), "cannot read nowhere.json: No such file"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    session: SessionBuilder, options: tuple[str, ...], says: str
) -> None:
    stories.swept(session)
    assert_fails(invoke("export", "perfetto", session.folder, *options), says)
    assert not (session.folder / "trace.pftrace").exists()


def test_the_beginning_of_an_id_will_do(session: SessionBuilder) -> None:
    _, row = stories.request("A", 1, 2, 50, [1, 2, 3], 0)
    ids = ["chatcmpl-17-aa", "chatcmpl-1", *(f"chatcmpl-2{number}" for number in range(7))]
    session.requests(*({**row, "request_id": name} for name in ids))

    def named(text: str) -> list[str]:
        return [one.track[-1] for one in exported(session, "--requests", text).named("request")]

    assert named("chatcmpl-17") == ["chatcmpl-17-aa"]
    # A whole id is no beginning of another one.
    assert named("chatcmpl-1,chatcmpl-26") == ["chatcmpl-1", "chatcmpl-26"]
    near = ", ".join(f"'chatcmpl-2{number}'" for number in range(5))
    says = f"the ids of 7 requests begin with 'chatcmpl-2'; give more of one of them: {near} …"
    assert_fails(invoke("export", "perfetto", session.folder, "--requests", "chatcmpl-2"), says)


@pytest.mark.parametrize("text", ["5", "5s:2s", ":", "x:2s"])
def test_a_window_that_is_none_is_refused(session: SessionBuilder, text: str) -> None:
    done = invoke("export", "perfetto", session.folder, "--window", text)
    assert done.returncode == 2
    assert "--window" in done.stderr


def profiled(folder: Path) -> tuple[Path, int, int]:
    """A real profile of torch's, and between which times on the wall clock its ``here`` ran."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        torch.ones(8).sum()  # what is made at the first call is no part of what is measured
        before = time.time_ns()
        with record_function("here"):
            torch.ones(8).sum()
        after = time.time_ns()
    path = folder / "profile.json"
    recorded.export_chrome_trace(str(path))
    return path, before, after


def test_a_profile_of_torchs_is_on_the_same_clock(session: SessionBuilder, tmp_path: Path) -> None:
    path, before, after = profiled(tmp_path)
    began = time.gmtime(before // SEC - 1)
    session.metadata(started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", began), ended_at=None)
    session.usage((0.5, 10), (5, 20))
    found = exported(session, "--torch", path)
    (here,) = found.named("here")
    assert before <= here.begin_ns < here.end_ns <= after
    inside = [
        one
        for one in found.slices
        if one.track == here.track and here.begin_ns <= one.begin_ns and one.end_ns <= here.end_ns
    ]
    assert {"aten::ones", "aten::sum"} <= {one.name for one in inside}
    assert all(one.depth == here.depth + 1 for one in inside if one.name == "aten::ones")
    assert here.track[0].startswith("torch: ")
    assert_fails(
        invoke("export", "perfetto", session.folder, "--torch", path, "--window", "4s:5s"),
        "nothing in it is of the time that is exported",
    )


def written(path: Path, events: list[dict[str, Any]], **other: Any) -> Path:
    trace = {"baseTimeNanoseconds": BEGAN_NS, "traceEvents": events, **other}
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return path


def test_launches_lead_to_kernels_and_slices_that_overlap_lie_apart(
    session: SessionBuilder, tmp_path: Path
) -> None:
    session.usage((0.5, 10), (5, 20))
    launch = {"ph": "X", "name": "launch", "pid": 7, "tid": 7, "ts": 1e6, "dur": 10}
    kernel = {"ph": "X", "name": "kernel", "pid": 0, "tid": 3, "ts": 1e6 + 5, "dur": 20}
    beside = kernel | {"name": "beside", "ts": 1e6 + 15}
    arrow = {"ph": "s", "cat": "ac2g", "id": 1, "pid": 7, "tid": 7, "ts": 1e6}
    to = arrow | {"ph": "f", "pid": 0, "tid": 3, "ts": 1e6 + 5}
    named = {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "GPU"}}
    path = written(tmp_path / "p.json.gz", [beside, to, kernel, launch, arrow, named])
    found = exported(session, "--torch", path)
    ((one, other),) = found.arrows
    assert (one.name, other.name) == ("launch", "kernel")
    assert (other.track[0], other.begin_ns) == ("torch: GPU 0", BEGAN_NS + SEC + 5_000)
    ends = {one.name: one.end_ns - one.begin_ns for one in found.slices}
    assert ends == {"launch": 10_000, "kernel": 20_000, "beside": 20_000}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is not JSON"),
        (b"[]", "has no traceEvents"),
        (b'{"traceEvents":[]}', "has no baseTimeNanoseconds"),
        (b'{"traceEvents":[],"baseTimeNanoseconds":1}', "nothing in it is of the time"),
        (b"\x1f\x8bx", "cannot read"),
    ],
)
def test_what_is_no_profile_is_refused(
    session: SessionBuilder, tmp_path: Path, content: bytes, says: str
) -> None:
    session.usage((0.5, 10), (5, 20))
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    assert_fails(invoke("export", "perfetto", session.folder, "--torch", path), says)
