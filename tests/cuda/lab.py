# SPDX-License-Identifier: Apache-2.0
"""Engines of vLLM's CUDA build, under a command that the environment gives, each started once.

PROFILEMATE_CUDA_RUN is a command under which ``python`` has vLLM's CUDA build, wrapt and orjson,
and a GPU, real or a stand-in. PROFILEMATE_CUDA_COUNTERS may name a stand-in's module of counters,
PROFILEMATE_CUDA_MODEL the folder of another model than the tests' own.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.server import Server, free_port
from tests.support import engine
from tests.support.engine import BLOCK_SIZE, BLOCKS, ROOT, START_SECONDS

RUN = "PROFILEMATE_CUDA_RUN"
MODEL = "PROFILEMATE_CUDA_MODEL"
APPS = Path(__file__).parent / "apps"

CAPTURE_SIZES = [1, 2, 4, 8, 16, 32, 64, 256]
"""Few, and the load has batches that pad to most of them, and some that exceed them all."""

OPTIONS: dict[str, Any] = {
    "max_model_len": 2048,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": BLOCKS,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": True,
    "gpu_memory_utilization": 0.3,
    "disable_log_stats": False,
    "cudagraph_metrics": True,
    "seed": 0,
}
"""What all engines are given. The pool is too small for the load: it evicts and preempts."""


def graphs(mode: str | None = None) -> dict[str, Any]:
    """The option that asks for this CUDA graph mode, or for vLLM's default one."""
    config: dict[str, Any] = {"cudagraph_capture_sizes": CAPTURE_SIZES}
    if mode is not None:
        config["cudagraph_mode"] = mode
    return {"compilation_config": config}


@dataclass(frozen=True)
class Run:
    """An offline engine that has ended, and what it left."""

    result: dict[str, Any]
    sessions: Path

    @property
    def session(self) -> Path:
        """Its one session."""
        return engine.only_session(self.sessions)

    @property
    def seen(self) -> dict[str, Any]:
        """All that was counted independently."""
        return dict(self.result["after"])

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        return engine.metadata(self.session)

    @functools.cached_property
    def captures(self) -> list[dict[str, str]]:
        return table(self.session, "cuda_graph_captures")

    @functools.cached_property
    def usage(self) -> list[dict[str, str]]:
        return table(self.session, "cuda_graph_usage")

    @functools.cached_property
    def timeline(self) -> list[dict[str, str]]:
        return table(self.session, "cuda_graph_timeline")

    @property
    def served(self) -> list[dict[str, str]]:
        """The executions that served requests."""
        return [row for row in self.timeline if row["dummy"] == "0"]

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """What the analyzer says, as JSON."""
        found: dict[str, Any] = json.loads(analyzed(self.session, "--json"))
        return found


def table(session: Path, name: str) -> list[dict[str, str]]:
    """A table's rows; none where it is absent."""
    return engine.rows(session, name) if (session / f"{name}.csv").exists() else []


def analyzed(session: Path, *options: str) -> str:
    """What ``profilemate summary`` prints; it must end well."""
    command = [sys.executable, "-m", "profilemate", "summary", str(session), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class CudaLab:
    """A folder in which engines run, each of a name and a model runner once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prefix = shlex.split(os.environ[RUN])
        given = os.environ.get(MODEL)
        self.model = Path(given) if given else engine.write_model(folder / "model")
        self._runs: dict[str, Run] = {}

    def run(
        self,
        runner: str,
        name: str,
        options: Mapping[str, Any],
        variables: Mapping[str, str] | None = None,
    ) -> Run:
        """An engine with these options of LLM's, unless one of that name has run already."""
        name = f"{name} {runner}"
        if name not in self._runs:
            self._runs[name] = self._run(runner, name, {**OPTIONS, **options}, variables or {})
        return self._runs[name]

    def environment(self, runner: str, name: str, **variables: str) -> dict[str, str]:
        """A user's shell with profilemate, and the independent counts, on PYTHONPATH."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        ours = [str(ROOT), str(APPS), str(ROOT / "tests" / "engine" / "apps")]
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join(ours),
            "VLLM_PROFILING_DIR": str(self.folder / name / "sessions"),
            "VLLM_PROFILING_GPU_INTERVAL": "0.5",
            "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2")),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **variables,
        }

    @contextmanager
    def server(self, runner: str, name: str, *options: str) -> Iterator[Server]:
        """``vllm serve``; all its processes are gone after the block."""
        name = f"{name} {runner}"
        port = free_port()
        config = json.dumps(graphs()["compilation_config"])
        command = [
            *self.prefix, "vllm", "serve", str(self.model), "--served-model-name",
            engine.SERVED_NAME, "--host=127.0.0.1", f"--port={port}", "--load-format=dummy",
            "--dtype=bfloat16", "--max-model-len=2048", f"--block-size={BLOCK_SIZE}",
            f"--num-gpu-blocks-override={BLOCKS}", "--max-num-seqs=16",
            "--gpu-memory-utilization=0.3", f"--compilation-config={config}",
            "--worker-extension-cls=independent.Extension", *options,
        ]  # fmt: skip
        with self._process(name, command, self.environment(runner, name)) as process:
            yield Server(process, port, self.folder / name / "log")

    def _run(
        self, runner: str, name: str, options: Mapping[str, Any], variables: Mapping[str, str]
    ) -> Run:
        result = self.folder / name / "result.json"
        program = ["python", str(APPS / "on_gpu.py"), str(self.model), str(result)]
        command = [*self.prefix, *program, json.dumps(options)]
        log = self.folder / name / "log"
        with self._process(name, command, self.environment(runner, name, **variables)) as process:
            status = process.wait(START_SECONDS)
            engine.wait_until_settled(self.folder / name / "sessions")
        assert status == 0, log.read_text(errors="replace")[-5000:]
        return Run(json.loads(result.read_text()), self.folder / name / "sessions")

    @contextmanager
    def _process(
        self, name: str, command: list[str], environment: Mapping[str, str]
    ) -> Iterator[subprocess.Popen[bytes]]:
        folder = self.folder / name
        folder.mkdir()
        with (folder / "log").open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
