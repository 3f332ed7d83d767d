# SPDX-License-Identifier: Apache-2.0
"""Offline engines on a GPU: the tables against counts kept below the hooks."""

from __future__ import annotations

from collections import Counter

import pandas as pd
import pytest

from tests.cuda.lab import CudaLab, Run, analyzed, graphs, table
from tests.support import engine

pytestmark = pytest.mark.engine

TIMED = {"VLLM_PROFILING_GPU_TIMING": "1", "VLLM_PROFILING_PHASES": "1"}
BREAKABLE = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
SEPARATE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
CASES = ("default", "piecewise, timed", "full", "eager", "breakable", "own process")

COUNTED_BY_VLLM = ("CUDAGraphWrapper", "CudaGraphManager")
"""Sources whose captures are in its ``num_cudagraph_captured``."""

REPEATABLE = (
    "captures_begun",
    "captures_ended",
    "captures_failed",
    "graphs_instantiated",
    "graph_launches",
    "kernels_captured",
    "kernels_replayed",
    "copies_captured",
    "copies_replayed",
    "syncs_refused_in_capture",
)
"""Counters of a stand-in that must not differ with profiling."""

SERVING = ("kernels_eager", "copies_eager", "events_recorded", "syncs", "fills_done")
"""As ``REPEATABLE``, while requests are served: start-up also compiles, unless that is cached."""


def engine_of(cuda: CudaLab, runner: str, case: str) -> Run:
    """The engine of one of ``CASES``."""
    options, variables = {
        "default": (graphs(), {}),
        "piecewise, timed": (graphs("PIECEWISE"), TIMED),
        "full": (graphs("FULL"), {}),
        "eager": ({"enforce_eager": True}, {}),
        "breakable": (graphs(), BREAKABLE),
        "own process": (graphs(), SEPARATE),
    }[case]
    return cuda.run(runner, case, options, variables)


@pytest.fixture(scope="session", params=CASES)
def run(request: pytest.FixtureRequest, cuda: CudaLab, runner: str) -> Run:
    """Each of the engines in turn."""
    return engine_of(cuda, runner, request.param)


@pytest.fixture(scope="session")
def default(cuda: CudaLab, runner: str) -> Run:
    """vLLM's default: FULL for batches of decodes, PIECEWISE for others."""
    return engine_of(cuda, runner, "default")


@pytest.fixture(scope="session")
def off(cuda: CudaLab, runner: str) -> Run:
    """As ``default``, with profiling switched off."""
    return cuda.run(runner, "off", graphs(), {"VLLM_PROFILING": "0"})


def graphs_in(rows: list[dict[str, str]], count: str = "num_graphs") -> int:
    """CUDA graphs replayed, by rows of the usage table."""
    return sum(int(row[count]) * int(row["num_graphs"] or 1) for row in rows)


class TestEveryEngine:
    def test_is_the_one_asked_for(self, run: Run, runner: str) -> None:
        assert run.seen["runner"] == runner
        assert run.metadata["cuda_graphs"]["runner"] == runner
        assert run.metadata["cuda_graphs"]["attention_backends"] == run.seen["backends"]
        assert run.metadata["device"] == "cuda"

    def test_session_is_sound(self, run: Run) -> None:
        assert run.metadata["complete"]
        assert run.metadata["dropped_events"] == 0
        assert {process["role"] for process in run.metadata["processes"]} == {"engine", "worker"}
        for process in run.metadata["processes"]:
            assert process["pid"] == run.seen["pid"]
            assert process["hooks_missing"] == process["hooks_failed"] == {}
            assert process["problem"] is None
            assert process["mismatches"] == 0

    def test_captures(self, run: Run) -> None:
        written = Counter[str]()
        for row in run.captures:
            written[row["kind"]] += int(row["num_graphs"])
        assert dict(written) == run.seen["captures"]
        if run.seen["stand_in"]:
            assert written.total() == run.seen["stand_in"]["captures_ended"]
            assert run.seen["stand_in"]["captures_failed"] == 0

    def test_vllm_counts_as_many(self, run: Run) -> None:
        counted = sum(
            int(row["num_graphs"])
            for row in run.captures
            # vLLM does not count those of the other sources.
            if row["kind"] == "capture"
            and row["source"] in ("CUDAGraphWrapper", "CudaGraphManager")
        )
        assert counted == run.seen["captured_by_vllm"]

    def test_each_batch_is_captured_once(self, run: Run) -> None:
        batches = ["runtime_mode", "num_tokens", "num_reqs", "uniform", "has_lora"]
        captured = [
            tuple(row[name] for name in batches) for row in run.captures if row["kind"] == "capture"
        ]
        assert len(captured) == len(set(captured)) == len(run.usage)
        assert {row["source"] for row in run.captures} <= {
            "CUDAGraphWrapper",
            "CudaGraphManager",
            "BreakableCUDAGraphWrapper",
        }
        breakable = sum(row["source"] == "BreakableCUDAGraphWrapper" for row in run.captures)
        assert breakable == run.seen["breakable"]

    def test_replays(self, run: Run) -> None:
        replayed = sum(int(row["replay_count"]) * int(row["num_graphs"]) for row in run.usage)
        assert replayed == sum(run.seen["replays"].values())
        assert replayed == sum(int(row["num_graphs"]) for row in run.timeline)
        if run.seen["stand_in"]:
            assert replayed == run.seen["stand_in"]["graph_launches"]
        warm_up = sum(int(row["dummy_count"]) * int(row["num_graphs"]) for row in run.usage)
        assert warm_up == sum(
            count for about, count in run.seen["replays"].items() if about != "serving"
        )

    def test_executions(self, run: Run) -> None:
        written = [
            [
                row["runtime_mode"],
                *(int(row[name]) for name in ("num_tokens", "unpadded_tokens", "num_graphs")),
            ]
            for row in run.served
        ]
        # A batch that was sent to a graph ran without one where none was replayed.
        wanted = [row if row[3] else ["NONE", *row[1:]] for row in run.seen["executions"]]
        assert written == wanted
        assert len(run.timeline) - len(written) == run.seen["dummies"]

    def test_dispatch_as_vllm_reports_it(self, run: Run) -> None:
        written = [
            [row["runtime_mode"], int(row["num_tokens"]), int(row["unpadded_tokens"])]
            for row in run.served
        ]
        # Model runner V2 has such statistics in later releases only.
        assert run.seen["dispatched"] in ([], written)
        if run.seen["runner"] == "V1":
            assert run.seen["dispatched"]

    def test_usage_is_the_timeline_added_up(self, run: Run) -> None:
        batch = ["runtime_mode", "num_tokens", "num_reqs", "uniform", "has_lora"]
        replays = Counter(
            tuple(row[name] for name in batch) for row in run.timeline if row["num_graphs"] != "0"
        )
        used = {tuple(row[name] for name in batch): int(row["replay_count"]) for row in run.usage}
        assert {key: count for key, count in used.items() if count} == dict(replays)

    def test_steps_and_executions_agree(self, run: Run) -> None:
        steps = engine.rows(run.session, "scheduler_steps")
        scheduled = [row for row in steps if row["scheduled_tokens"] != "0"]
        assert len(scheduled) == len(run.served)
        assert engine.total(scheduled, "scheduled_tokens") == engine.total(
            run.served, "unpadded_tokens"
        )

    def test_memory_is_what_the_worker_keeps(self, run: Run) -> None:
        written, kept = run.metadata["memory"], run.seen["memory"]
        assert written["total_bytes"] == kept["total_memory"]
        assert written["requested_bytes"] == kept["requested_memory"]
        assert written["weights_bytes"] == kept["model_memory_usage"]
        assert written["graphs_estimated_bytes"] == kept["cudagraph_memory_estimate"]
        assert written["graphs_bytes"] == kept["graphs_bytes"]
        assert written["kv_bytes"] == kept["available_kv_cache_memory_bytes"]
        assert written["kv_allocated_bytes"] == kept["kv_allocated_bytes"]
        assert written["blocks"] == kept["num_blocks"] == engine.BLOCKS

    def test_memory_adds_up_to_what_was_asked_for(self, run: Run) -> None:
        written = run.metadata["memory"]
        parts = ("weights_bytes", "activation_bytes", "non_torch_bytes", "kv_bytes")
        estimate = written["graphs_estimated_bytes"] * written["graphs_estimate_applied"]
        assert sum(written[part] for part in parts) + estimate == written["requested_bytes"]

    def test_gpu_memory_is_sampled(self, run: Run) -> None:
        (gpu,) = run.metadata["gpus"]
        assert run.metadata["gpu_memory"]["problem"] is None
        samples = table(run.session, "gpu_memory")
        assert len(samples) > 1
        for row in samples:
            assert row["gpu"] == str(gpu["gpu"])
            used, free = int(row["used_bytes"]), int(row["free_bytes"])
            assert 0 < used < used + free <= gpu["total_bytes"]
            assert 0 <= int(row["utilization_pct"]) <= 100

    def test_blocks_are_those_counted_in_the_pool(self, run: Run) -> None:
        counted = run.seen["blocks"]
        evictions = pd.read_csv(run.session / "kv_cache_evictions.csv")
        assert counted["evicted"] == len(evictions) > engine.TOTAL_BLOCKS
        for event, name in (("allocate", "allocated"), ("reuse", "reused"), ("free", "freed")):
            assert engine.moved(run.session, event) == counted[name], event
        for column in ("lifetime", "idle"):
            written = evictions[f"{column}_sec"].mean()
            # Both look at the clock, one after the other, while others may have the processor.
            assert written == pytest.approx(counted[f"mean_{column}"], abs=0.01)
        steps = engine.rows(run.session, "scheduler_steps")
        assert engine.total(steps, "preempted_reqs") == counted["preemptions"] > 0

    def test_requests_are_those_answered(self, run: Run) -> None:
        engine.assert_answered(run.session, run.result)

    def test_the_analyzer_answers(self, run: Run) -> None:
        found = run.summary["cuda_graphs"]
        in_graphs = sum(row[3] > 0 for row in run.seen["executions"])
        assert (found["executions"], found["in_graphs"]) == (len(run.served), in_graphs)
        padding = sum(row[1] - row[2] for row in run.seen["executions"] if row[3])
        assert found["padding"]["tokens"] == padding
        assert "In a graph" in analyzed(run.session, "--full")


class TestModes:
    """What each mode leads to, as vLLM documents it."""

    def modes(self, run: Run) -> set[str]:
        return {row["runtime_mode"] for row in run.captures}

    def test_default(self, default: Run) -> None:
        assert self.modes(default) == {"FULL", "PIECEWISE"}
        assert {row["runtime_mode"] for row in default.served} == {"FULL", "PIECEWISE", "NONE"}
        assert default.metadata["cuda_graphs"]["asked"] == "FULL_AND_PIECEWISE"
        assert default.metadata["cuda_graphs"]["resolved"] == "FULL_AND_PIECEWISE"

    def test_pieces_are_one_entry(self, default: Run) -> None:
        pieces = {row["runtime_mode"]: int(row["num_graphs"]) for row in default.captures}
        assert pieces["FULL"] == 1
        assert pieces["PIECEWISE"] > 1

    def test_piecewise(self, cuda: CudaLab, runner: str) -> None:
        run = engine_of(cuda, runner, "piecewise, timed")
        assert self.modes(run) == {"PIECEWISE"}
        assert run.metadata["cuda_graphs"]["resolved"] == "PIECEWISE"

    def test_full(self, cuda: CudaLab, runner: str) -> None:
        run = engine_of(cuda, runner, "full")
        assert self.modes(run) == {"FULL"}
        assert {row["runtime_mode"] for row in run.served} == {"FULL", "NONE"}

    def test_eager(self, cuda: CudaLab, runner: str) -> None:
        run = engine_of(cuda, runner, "eager")
        assert run.captures == run.usage == []
        assert {row["runtime_mode"] for row in run.timeline} == {"NONE"}
        assert run.metadata["cuda_graphs"]["resolved"] == "NONE"

    def test_time_on_the_gpu_is_recorded_where_asked_for(self, cuda: CudaLab, runner: str) -> None:
        run = engine_of(cuda, runner, "piecewise, timed")
        timed = [row for row in run.timeline if row["gpu_us"]]
        replayed = [row for row in run.timeline if row["num_graphs"] != "0"]
        assert timed == replayed != []
        written = sum(float(row["total_gpu_sec"] or 0) for row in run.usage)
        assert written == pytest.approx(sum(int(row["gpu_us"]) for row in timed) / 1e6, rel=0.02)

    def test_steps_are_timed_by_phase_where_asked_for(self, cuda: CudaLab, runner: str) -> None:
        run = engine_of(cuda, runner, "piecewise, timed")
        tokens = ("prefill_tokens", "decode_tokens")
        scheduled = [
            [row[name] for name in tokens]
            for row in engine.rows(run.session, "scheduler_steps")
            if row["scheduled_tokens"] != "0"
        ]
        timed = table(run.session, "gpu_steps")
        assert [[row[name] for name in tokens] for row in timed] == scheduled
        assert {(row[tokens[0]] != "0", row[tokens[1]] != "0") for row in timed} == {
            (True, False),
            (False, True),
            (True, True),
        }
        assert all(row["gpu_us"] and row["encoder_us"] == "0" for row in timed)
        # A step has all of its replays in it.
        replays = sum(int(row["gpu_us"]) for row in run.served if row["gpu_us"])
        assert sum(int(row["gpu_us"]) for row in timed) > replays
        assert run.metadata["phases"] == {"workers": [0], "problem": None}
        found = run.summary["gpu_time"]
        assert (found["steps"], found["timed"]) == (len(timed), len(timed))

    def test_and_only_there(self, default: Run) -> None:
        assert not any(row["gpu_us"] for row in default.timeline)
        assert not (default.session / "gpu_steps.csv").exists()
        assert default.metadata["phases"] is None
        assert not any(row["total_gpu_sec"] for row in default.usage)


class TestSwitchedOff:
    def test_nothing_is_written(self, off: Run) -> None:
        assert not off.sessions.exists()

    def test_outputs_are_the_same(self, default: Run, off: Run) -> None:
        for name in ("identical", "mixed"):
            assert default.result[name] == off.result[name]

    def test_the_engine_did_the_same(self, default: Run, off: Run) -> None:
        for name in ("captures", "replays", "executions", "dummies"):
            assert default.seen[name] == off.seen[name], name

    def test_the_engine_found_the_same_memory(
        self, cuda: CudaLab, runner: str, default: Run, off: Run
    ) -> None:
        # The first of these engines may have compiled the model, which takes more memory.
        separate = engine_of(cuda, runner, "own process")
        assert default.seen["captures"] == separate.seen["captures"]
        assert separate.seen["memory"] == off.seen["memory"]

    def test_the_stand_in_counted_the_same(self, default: Run, off: Run) -> None:
        for name in REPEATABLE:
            assert default.seen["stand_in"].get(name) == off.seen["stand_in"].get(name), name
        for name in SERVING:
            assert served(default, name) == served(off, name), name


def served(run: Run, name: str) -> int | None:
    """What a stand-in counted while requests were served."""
    before, after = (run.result[when]["stand_in"].get(name) for when in ("before", "after"))
    return None if after is None else after - before
