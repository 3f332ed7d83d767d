# SPDX-License-Identifier: Apache-2.0
"""Does a whole engine of vLLM's run as before, and do the tables say what it did?

The program, and what counts independently in its process, are those of tests/cuda.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from .report import Report

ROOT = Path(__file__).resolve().parent.parent.parent
APPS = (ROOT / "tests" / "cuda" / "apps", ROOT / "tests" / "engine" / "apps")
TIMEOUT_SEC = 270
SETTLED_SEC = 20

MAX_TOKENS = 2048
OPTIONS = {
    "max_model_len": MAX_TOKENS,
    "block_size": 32,
    "num_gpu_blocks_override": 128,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.3,
    "disable_log_stats": False,
    "cudagraph_metrics": True,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 256]},
}

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # What would be compiled at its first use, which takes minutes.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
}
"""What vLLM needs on a machine without a network; what is set outside wins."""


def check(report: Report, folder: Path) -> None:
    """Run an engine, and compare its session with what was counted."""
    result = folder / "engine.json"
    began = time.monotonic()
    status = _run(_model(folder / "model"), result, folder)
    report.check("ends well", status, 0)
    if status:
        print((folder / "engine.log").read_text(errors="replace")[-3000:])
        return
    (session,) = (folder / "sessions").glob("session_*")
    _wait(session)
    found = json.loads(result.read_text())
    seen = found["after"]
    report.note("vLLM", f"{found['vllm']}, model runner {seen['runner']}, {seen['backends']}")
    report.note("took", f"{time.monotonic() - began:.0f} s")
    _compare(report, session, seen)
    _analyze(report, session)


def _compare(report: Report, session: Path, seen: dict[str, Any]) -> None:
    captured = Counter[str]()
    for row in _rows(session, "cuda_graph_captures"):
        captured[row["kind"]] += int(row["num_graphs"])
    report.check("CUDA graphs captured", dict(captured), seen["captures"])
    report.check("by vLLM's own count", captured["capture"], seen["captured_by_vllm"])
    timeline = _rows(session, "cuda_graph_timeline")
    replayed = sum(int(row["num_graphs"]) for row in timeline)
    report.check("CUDA graphs replayed", replayed, sum(seen["replays"].values()))
    served = [
        [row["runtime_mode"], *(int(row[name]) for name in ("num_tokens", "unpadded_tokens"))]
        for row in timeline
        if row["dummy"] == "0"
    ]
    wanted = [row[:3] for row in seen["executions"]]
    report.hold("executions, batch by batch", served == wanted, f"{len(served)} of {len(wanted)}")
    untimed = sum(bool(row["num_graphs"] != "0") and not row["gpu_us"] for row in timeline)
    report.check("executions without a GPU time", untimed, 0)
    evicted = len(_rows(session, "kv_cache_evictions"))
    report.check("blocks evicted", evicted, seen["blocks"]["evicted"])
    known = json.loads((session / "metadata.json").read_text())
    kept = seen["memory"]["available_kv_cache_memory_bytes"]
    report.check("bytes for the KV cache", known["memory"]["kv_bytes"], kept)
    report.note("samples of GPU memory", f"{len(_rows(session, 'gpu_memory'))}")
    report.check("nothing dropped", known["dropped_events"], 0)


def _analyze(report: Report, session: Path) -> None:
    if importlib.util.find_spec("polars") is None:
        report.note("the analyzer", f"needs polars, which is not here; the session: {session}")
        return
    done = subprocess.run(
        [sys.executable, "-m", "profilemate", "summary", "--full", str(session)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    report.check("the analyzer answers", done.returncode, 0)
    print(done.stdout or done.stderr)


def _model(folder: Path) -> Path:
    """The demo's tiny Llama, for longer prompts."""
    # By name: the demo's program knows this module as its neighbour, without the package.
    importlib.import_module("demo.tiny_model").write_model(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"max_position_embeddings": MAX_TOKENS}))
    return folder


def _run(model: Path, result: Path, folder: Path) -> int:
    """Run the program; its exit status, -1 where it took too long."""
    path = [str(ROOT), *map(str, APPS), os.environ.get("PYTHONPATH", "")]
    environment = {
        **OFFLINE,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "VLLM_PROFILING_DIR": str(folder / "sessions"),
        "VLLM_PROFILING_GPU_TIMING": "1",
    }
    command = [sys.executable, str(APPS[0] / "on_gpu.py"), str(model), str(result)]
    with (folder / "engine.log").open("wb") as log:
        try:
            return subprocess.run(
                [*command, json.dumps(OPTIONS)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=TIMEOUT_SEC,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return -1


def _wait(session: Path) -> None:
    """Until the tables are complete, but not for long."""
    deadline = time.monotonic() + SETTLED_SEC
    while time.monotonic() < deadline:
        metadata = session / "metadata.json"
        if metadata.exists() and json.loads(metadata.read_text())["complete"]:
            return
        time.sleep(0.1)


def _rows(session: Path, table: str) -> list[dict[str, str]]:
    path = session / f"{table}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
