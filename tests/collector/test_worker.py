# SPDX-License-Identifier: Apache-2.0
"""A worker's journal, written by hand, makes these very rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from profilemate import collector
from profilemate.collector.follower import Follower
from tests.collector.journals import (
    CAPTURES,
    TIMELINE,
    USAGE,
    EngineJournal,
    WorkerJournal,
    bytes_of,
    lines,
    make_tables,
    metadata,
    rows,
    tables_of,
)

SECOND = 1_000_000


def test_one_graph_an_entry(tmp_path: Path) -> None:
    """Two sizes captured; three batches of 3 and 4 requests, padded to 4, and one of 8."""
    worker = WorkerJournal(tmp_path)
    worker.graph(SECOND, 1, ("FULL", 8, 8, 1, 0), source="CudaGraphManager")
    worker.captured(1_000_100, 1_250_100, 1, kib=2048)
    worker.graph(2 * SECOND, 2, ("FULL", 4, 4, 1, 0), source="CudaGraphManager")
    worker.captured(2_000_000, 2_100_000, 2, kib=0)
    worker.batch(3 * SECOND, 1, ("FULL", 4, 4, 1, 0))
    worker.executed(3_000_010, 1, tokens=3, entry=2, graphs=1, launch_ns=11_499)
    worker.executed(3_010_000, 1, tokens=4, entry=2, graphs=1, launch_ns=11_500)
    worker.executed(3_020_000, 1, tokens=4, entry=2, graphs=1, launch_ns=10_001)
    worker.batch(3_030_000, 2, ("FULL", 8, 8, 1, 0))
    worker.executed(3_030_001, 2, tokens=8, entry=1, graphs=1, launch_ns=20_000)
    tables = tables_of(worker)
    assert (tables / CAPTURES).read_text() == (
        "runtime_mode,num_tokens,num_reqs,uniform,has_lora,capture_time_sec,duration_sec,"
        "num_graphs,memory_bytes,source,kind,worker,part\n"
        "FULL,8,8,1,0,1.000100,0.250000,1,2097152,CudaGraphManager,capture,0,model\n"
        "FULL,4,4,1,0,2.000000,0.100000,1,0,CudaGraphManager,capture,0,model\n"
    )
    assert (tables / USAGE).read_text() == (
        "runtime_mode,num_tokens,num_reqs,uniform,has_lora,replay_count,total_launch_sec,"
        "total_gpu_sec,worker,num_graphs,source,part,dummy_count,capture_time_sec\n"
        "FULL,4,4,1,0,3,0.000033,,0,1,CudaGraphManager,model,0,2.000000\n"
        "FULL,8,8,1,0,1,0.000020,,0,1,CudaGraphManager,model,0,1.000100\n"
    )
    assert (tables / TIMELINE).read_text() == (
        "timestamp_sec,runtime_mode,num_tokens,num_reqs,uniform,has_lora,unpadded_tokens,"
        "launch_us,gpu_us,dummy,worker,num_graphs\n"
        "3.000010,FULL,4,4,1,0,3,11,,0,0,1\n"
        "3.010000,FULL,4,4,1,0,4,12,,0,0,1\n"
        "3.020000,FULL,4,4,1,0,4,10,,0,0,1\n"
        "3.030001,FULL,8,8,1,0,8,20,,0,0,1\n"
    )
    assert all((tables / table).stat().st_mode & 0o777 == 0o600 for table in (CAPTURES, USAGE))


def test_piecewise_entry_has_several_graphs(tmp_path: Path) -> None:
    """Three pieces, captured with pauses between: one row, one replay an execution."""
    worker = WorkerJournal(tmp_path)
    worker.graph(0, 1, ("PIECEWISE", 16, None, 0, 1))
    worker.captured(100, 1_100, 1, kib=100)
    worker.captured(2_000, 4_000, 1, kib=20)
    worker.captured(5_000, 8_000, 1, kib=3)
    worker.batch(9_000, 1, ("PIECEWISE", 16, None, 0, 1))
    worker.executed(10_000, 1, tokens=9, entry=1, graphs=3, launch_ns=30_000)
    worker.executed(20_000, 1, tokens=16, entry=1, graphs=3, launch_ns=31_000)
    # One of its pieces outside an execution: no replay of the whole.
    worker.replayed(21_000, 1, graphs=1, launch_ns=9_000)
    tables = tables_of(worker)
    assert lines(tables, CAPTURES) == [
        "PIECEWISE,16,,0,1,0.000100,0.006000,3,125952,CUDAGraphWrapper,capture,0,model"
    ]
    assert lines(tables, USAGE) == [
        "PIECEWISE,16,,0,1,2,0.000070,,0,3,CUDAGraphWrapper,model,0,0.000100"
    ]
    assert lines(tables, TIMELINE) == [
        "0.010000,PIECEWISE,16,,0,1,9,30,,0,0,3",
        "0.020000,PIECEWISE,16,,0,1,16,31,,0,0,3",
    ]


def test_memory_of_one_graph_is_not_known(tmp_path: Path) -> None:
    """Then the entry's memory is not known either: a part of it would look like all."""
    worker = WorkerJournal(tmp_path)
    worker.graph(0, 1, ("PIECEWISE", 8, None, 0, 0))
    worker.captured(100, 200, 1, kib=100)
    worker.captured(300, 400, 1, kib=None)
    worker.captured(500, 600, 1, kib=100)
    worker.graph(700, 2, ("PIECEWISE", 4, None, 0, 0))
    worker.captured(800, 900, 2, kib=7)
    tables = tables_of(worker)
    assert [row["memory_bytes"] for row in rows(tables, CAPTURES)] == ["", "7168"]


def test_cleared_and_captured_again(tmp_path: Path) -> None:
    """The same descriptor twice: two captures, each with the replays that were its own."""
    batch = ("FULL", 4, 4, 1, 0)
    worker = WorkerJournal(tmp_path)
    worker.graph(0, 1, batch)
    worker.captured(1_000, 2_000, 1, kib=64)
    worker.batch(3_000, 1, batch)
    for at in (4_000, 5_000):
        worker.executed(at, 1, tokens=4, entry=1, graphs=1, launch_ns=1_000)
    worker.graph(6_000, 2, batch)
    worker.captured(7_000, 9_000, 2, kib=32)
    worker.executed(10_000, 1, tokens=2, entry=2, graphs=1, launch_ns=1_000)
    tables = tables_of(worker)
    captured = [(row["capture_time_sec"], row["duration_sec"]) for row in rows(tables, CAPTURES)]
    assert captured == [("0.001000", "0.001000"), ("0.007000", "0.002000")]
    used = [(row["capture_time_sec"], row["replay_count"]) for row in rows(tables, USAGE)]
    assert used == [("0.001000", "2"), ("0.007000", "1")]


def test_profiling_captures(tmp_path: Path) -> None:
    """What start-up captures and throws away is captured, and used only if it was replayed."""
    worker = WorkerJournal(tmp_path)
    worker.graph(0, 1, ("FULL", 512, 512, 1, 0), kind="profiling")
    worker.captured(100, 200, 1, kib=4)
    worker.graph(300, 2, ("FULL", 256, 256, 1, 0), kind="profiling")
    worker.captured(400, 500, 2, kib=4)
    worker.replayed(600, 2, graphs=1, launch_ns=2_000)
    worker.graph(700, 3, ("FULL", 512, 512, 1, 0))
    worker.captured(800, 900, 3, kib=4)
    tables = tables_of(worker)
    kinds = [(row["num_tokens"], row["kind"]) for row in rows(tables, CAPTURES)]
    assert kinds == [("512", "profiling"), ("256", "profiling"), ("512", "capture")]
    used = [(row["num_tokens"], row["replay_count"]) for row in rows(tables, USAGE)]
    assert used == [("256", "1"), ("512", "0")]


def test_capture_that_failed_is_none(tmp_path: Path) -> None:
    """An entry without a graph has no row: nothing was captured."""
    worker = WorkerJournal(tmp_path)
    worker.graph(0, 1, ("FULL", 512, 512, 1, 0))
    worker.batch(100, 1, ("NONE", 512, None, 0, 0))
    worker.executed(200, 1, tokens=500)
    tables = tables_of(worker)
    assert not (tables / CAPTURES).exists()
    assert not (tables / USAGE).exists()
    assert lines(tables, TIMELINE) == ["0.000200,NONE,512,,0,0,500,,,0,0,0"]


def test_drafter_is_no_execution(tmp_path: Path) -> None:
    """Its graphs count for usage alone; rows are in the order of parts."""
    worker = WorkerJournal(tmp_path)
    worker.graph(0, 1, ("FULL", 8, 2, 1, 0))
    worker.captured(100, 200, 1, kib=4)
    worker.graph(300, 2, ("FULL", 2, 2, 1, 0), part="drafter")
    worker.captured(400, 500, 2, kib=4)
    worker.batch(600, 1, ("FULL", 8, 2, 1, 0))
    for at in (1_000, 2_000):
        worker.executed(at, 1, tokens=8, entry=1, graphs=1, launch_ns=1_000)
        worker.replayed(at + 1, 2, graphs=3, launch_ns=3_000)
    tables = tables_of(worker)
    assert lines(tables, USAGE) == [
        "FULL,2,2,1,0,6,0.000006,,0,1,CUDAGraphWrapper,drafter,0,0.000400",
        "FULL,8,2,1,0,2,0.000002,,0,1,CUDAGraphWrapper,model,0,0.000100",
    ]
    assert [row["num_tokens"] for row in rows(tables, TIMELINE)] == ["8", "8"]


def test_graphs_that_nobody_saw_captured(tmp_path: Path) -> None:
    """Replays of them count all the same, each graph as one: in an execution, and outside."""
    worker = WorkerJournal(tmp_path)
    worker.batch(0, 1, ("FULL", 8, 8, 1, 0))
    worker.executed(1_000, 1, tokens=8, entry=0, graphs=2, launch_ns=5_000)
    worker.executed(2_000, 1, tokens=8, entry=0, graphs=2, launch_ns=5_000, dummy=1)
    worker.replayed(3_000, 0, graphs=1, launch_ns=2_000)
    tables = tables_of(worker)
    assert lines(tables, USAGE) == [",,,,,5,0.000012,,0,,unknown,unknown,2,"]
    assert len(lines(tables, TIMELINE)) == 2


def test_graphs_that_nobody_named(tmp_path: Path) -> None:
    """Captured where no part of vLLM is known to: counted, without a descriptor."""
    worker = WorkerJournal(tmp_path)
    worker.graph(0, 1, (None, None, None, None, None), source="unknown", part="unknown")
    worker.captured(1_000, 3_000, 1, kib=1)
    worker.replayed(4_000, 1, graphs=1, launch_ns=2_000)
    tables = tables_of(worker)
    assert lines(tables, CAPTURES) == [",,,,,0.001000,0.002000,1,1024,unknown,capture,0,unknown"]
    assert lines(tables, USAGE) == [",,,,,1,0.000002,,0,1,unknown,unknown,0,0.001000"]


def test_execution_of_which_only_the_entry_is_known(tmp_path: Path) -> None:
    """Its batch is the entry's."""
    worker = WorkerJournal(tmp_path)
    worker.graph(0, 1, ("PIECEWISE", 8, None, 0, 1))
    worker.captured(100, 200, 1, kib=4)
    worker.executed(1_000, 0, tokens=5, entry=1, graphs=1, launch_ns=7_000)
    tables = tables_of(worker)
    assert lines(tables, TIMELINE) == ["0.001000,PIECEWISE,8,,0,1,5,7,,0,0,1"]


def test_dummy_and_eager_executions(tmp_path: Path) -> None:
    """Dummies are marked in both tables; an eager execution has no launch time."""
    worker = WorkerJournal(tmp_path)
    worker.graph(0, 1, ("FULL", 8, 8, 1, 0))
    worker.captured(100, 200, 1, kib=4)
    worker.batch(300, 1, ("FULL", 8, 8, 1, 0))
    worker.batch(400, 2, ("NONE", 1000, None, 0, 0))
    worker.executed(1_000, 1, tokens=8, entry=1, graphs=1, launch_ns=7_000, dummy=1)
    worker.executed(2_000, 2, tokens=1000)
    worker.executed(3_000, 1, tokens=5, entry=1, graphs=1, launch_ns=7_000)
    worker.executed(4_000, 2, tokens=1000, dummy=1)
    tables = tables_of(worker)
    assert lines(tables, TIMELINE) == [
        "0.001000,FULL,8,8,1,0,8,7,,1,0,1",
        "0.002000,NONE,1000,,0,0,1000,,,0,0,0",
        "0.003000,FULL,8,8,1,0,5,7,,0,0,1",
        "0.004000,NONE,1000,,0,0,1000,,,1,0,0",
    ]
    (used,) = rows(tables, USAGE)
    assert (used["replay_count"], used["dummy_count"]) == ("2", "1")


def test_time_on_the_gpu(tmp_path: Path) -> None:
    """The sum is that of the measured replays; 0 ns is a measurement, too."""
    worker = WorkerJournal(tmp_path, gpu_timing=True)
    for number, tokens in ((1, 8), (2, 4), (3, 2), (4, 1)):
        worker.graph(100 * number, number, ("FULL", tokens, tokens, 1, 0))
        worker.captured(100 * number, 100 * number + 50, number, kib=4)
    worker.batch(900, 1, ("FULL", 8, 8, 1, 0))
    worker.executed(1_000, 1, tokens=8, entry=1, graphs=1, launch_ns=7_000, gpu_ns=1_234_500)
    worker.executed(2_000, 1, tokens=8, entry=1, graphs=1, launch_ns=7_000)
    worker.executed(3_000, 1, tokens=8, entry=1, graphs=1, launch_ns=7_000, gpu_ns=100_400)
    worker.replayed(4_000, 2, graphs=1, gpu_ns=0)
    worker.replayed(5_000, 3, graphs=1)
    tables = tables_of(worker)
    assert [row["gpu_us"] for row in rows(tables, TIMELINE)] == ["1235", "", "100"]
    assert [(row["num_tokens"], row["total_gpu_sec"]) for row in rows(tables, USAGE)] == [
        ("1", "0.000000"),
        ("2", ""),
        ("4", "0.000000"),
        ("8", "0.001335"),
    ]


def test_two_workers(tmp_path: Path) -> None:
    """Their executions come in turn, whichever journal is read first; usage by worker."""
    workers = [WorkerJournal(tmp_path, rank) for rank in (10, 2)]
    for shift, worker in enumerate(workers):
        for number, (part, mode, tokens) in enumerate(
            [
                ("model", "PIECEWISE", 8),
                ("model", "FULL", 16),
                ("model", "FULL", 8),
                ("drafter", "FULL", 4),
            ],
            1,
        ):
            worker.graph(10 * number, number, (mode, tokens, None, 0, 0), part=part)
            worker.captured(10 * number, 10 * number + 5, number, kib=4)
        worker.batch(100, 1, ("FULL", 8, None, 0, 0))
        worker.flush()
        for turn in range(3):
            worker.executed(1_000 + 100 * turn + shift, 1, tokens=8, entry=3, graphs=1)
            worker.flush()
        worker.killed()
    tables = make_tables(workers[0].folder, tmp_path / "tables")
    assert [(row["timestamp_sec"], row["worker"]) for row in rows(tables, TIMELINE)] == [
        ("0.001000", "10"),
        ("0.001001", "2"),
        ("0.001100", "10"),
        ("0.001101", "2"),
        ("0.001200", "10"),
        ("0.001201", "2"),
    ]
    each = [
        ("drafter", "FULL", "4"),
        ("model", "FULL", "8"),
        ("model", "FULL", "16"),
        ("model", "PIECEWISE", "8"),
    ]
    assert [
        (row["worker"], row["part"], row["runtime_mode"], row["num_tokens"])
        for row in rows(tables, USAGE)
    ] == [(worker, *entry) for worker in ("2", "10") for entry in each]
    assert [row["replay_count"] for row in rows(tables, USAGE)] == ["0", "3", "0", "0"] * 2


def test_rows_of_captures_come_while_vllm_runs(tmp_path: Path) -> None:
    """With the next entry, and with the first execution in a graph: not with an eager one."""
    worker = WorkerJournal(tmp_path)
    target = tmp_path / "tables"
    target.mkdir()
    follower = Follower(worker.folder, target)

    def captures() -> int:
        worker.flush()
        follower.discover()
        follower.read()
        follower.apply()
        return len(lines(target, CAPTURES))

    worker.batch(0, 1, ("NONE", 8, None, 0, 0))
    worker.batch(1, 2, ("FULL", 8, 8, 1, 0))
    worker.graph(10, 1, ("FULL", 8, 8, 1, 0))
    worker.captured(10, 15, 1, kib=4)
    worker.executed(20, 1, tokens=8, dummy=1)
    assert captures() == 0
    worker.graph(30, 2, ("FULL", 4, 4, 1, 0))
    assert captures() == 1
    worker.captured(30, 35, 2, kib=4)
    worker.executed(40, 2, tokens=8, entry=1, graphs=1)
    assert captures() == 2
    worker.graph(50, 3, ("FULL", 2, 2, 1, 0))
    worker.captured(50, 55, 3, kib=4)
    assert captures() == 2
    follower.close()
    assert len(lines(target, CAPTURES)) == 3


@pytest.mark.parametrize("same_frame", [True, False])
def test_what_is_recorded_late(tmp_path: Path, same_frame: bool) -> None:
    """An execution that waited for its time on the GPU is older than the events before it."""
    worker = WorkerJournal(tmp_path, gpu_timing=True)
    worker.batch(0, 1, ("FULL", 8, 8, 1, 0))
    worker.graph(2_000, 1, ("FULL", 8, 8, 1, 0))
    worker.captured(2_000, 3_000, 1, kib=4)
    if not same_frame:
        worker.flush()
    worker.executed(1_000, 1, tokens=8, entry=1, graphs=1, gpu_ns=5_000)
    tables = tables_of(worker)
    assert metadata(tables)["processes"][0]["problem"] is None
    assert metadata(tables)["duration_sec"] == 0.003
    assert [row["replay_count"] for row in rows(tables, USAGE)] == ["1"]


def test_batch_that_was_never_recorded(tmp_path: Path) -> None:
    """What came before it is there, and the session says that it has gaps."""
    worker = WorkerJournal(tmp_path)
    worker.batch(0, 1, ("NONE", 8, None, 0, 0))
    worker.executed(1_000, 1, tokens=8)
    worker.flush()
    worker.executed(2_000, 7, tokens=8)
    worker.killed()
    collector.finalize(worker.folder)
    assert len(lines(worker.folder, TIMELINE)) == 1
    found = metadata(worker.folder)
    assert "could not be applied: KeyError: 7" in found["processes"][0]["problem"]
    assert not found["complete"]


@pytest.mark.parametrize("killed", [True, False])
def test_session_without_workers_has_none_of_it(tmp_path: Path, killed: bool) -> None:
    engine = EngineJournal(tmp_path)
    engine.allocated(1_000, 1, 2)
    if killed:
        engine.killed()
    else:
        engine.recorder.close()
    collector.finalize(engine.folder)
    assert lines(engine.folder, "scheduler_steps.csv")
    assert not bytes_of(engine.folder)
