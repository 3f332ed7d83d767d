# SPDX-License-Identifier: Apache-2.0
"""Real engines, each started once and shared by the tests that look at what it left.

A start takes 20 to 40 s, most of it on one core, so engines are started two at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from demo.server import Server, serve

from profilemate import collector
from tests.support import engine
from tests.support.engine import Answer, answer
from tests.support.scheduler import tokens

IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be served."""
    return engine.write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where vLLM may keep what it wants to keep."""
    return tmp_path_factory.mktemp("caches")


@dataclass(frozen=True)
class Run:
    """A run of the application that has ended: exit status, log, result and sessions."""

    status: int
    log: str
    result: dict[str, Any]
    sessions: Path


def run_together(
    llama: Path, folder: Path, runs: dict[str, tuple[dict[str, str], list[str]]]
) -> dict[str, Run]:
    """Run the application once for each environment and options, all at the same time.

    Sessions go to ``folder`` / name / sessions.
    """
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                engine.application(llama, folder, name, environ, *options)
            )
            for name, (environ, options) in runs.items()
        }
        ended = {}
        for name, application in started.items():
            status = application.wait()
            log, result = application.text(), application.result
            ended[name] = Run(status, log, result, folder / name / "sessions")
            engine.wait_until_settled(ended[name].sessions)
    return ended


@pytest.fixture(scope="session")
def offline(
    llama: Path, caches: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """``LLM`` in one process: ``bare`` without profilemate, and ``profiled``."""
    folder = tmp_path_factory.mktemp("offline")
    bare = engine.environment(caches, **IN_ONE_PROCESS)
    profiled = engine.environment(caches, folder / "profiled" / "sessions", **IN_ONE_PROCESS)
    runs = {"bare": (bare, ["--count"]), "profiled": (profiled, ["--count"])}
    return run_together(llama, folder, runs)


@pytest.fixture(scope="session")
def unprofiled(
    llama: Path, caches: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """``LLM`` with profilemate there but ``switched-off``, or with ``nowhere`` to write to."""
    folder = tmp_path_factory.mktemp("unprofiled")
    (folder / "file").touch()
    off = engine.environment(
        caches, folder / "switched-off" / "sessions", VLLM_PROFILING="0", **IN_ONE_PROCESS
    )
    nowhere = engine.environment(caches, folder / "file" / "sessions", **IN_ONE_PROCESS)
    runs = {"switched-off": (off, ["--count"]), "nowhere": (nowhere, ["--count"])}
    return run_together(llama, folder, runs)


@dataclass(frozen=True)
class KilledEngine:
    """A forked engine core that was killed in the middle of a step or between two."""

    run: Run
    before: dict[str, bytes]
    """Tables made from the journal as it was just before."""
    journal_grew: bool
    """Whether the engine was still writing when it was killed."""


@pytest.fixture(scope="session")
def several_processes(
    llama: Path, caches: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, KilledEngine]:
    """``LLM`` with two tensor-parallel workers, spawned; and one that is forked, then killed."""
    folder = tmp_path_factory.mktemp("processes")
    spawned_sessions, forked_sessions = folder / "spawned", folder / "forked"
    spawned_environ = engine.environment(caches, spawned_sessions)
    forked_environ = engine.environment(
        # Kubernetes adds this one for a service that is called vllm-profiling.
        caches,
        forked_sessions,
        VLLM_PROFILING_PORT="tcp://10.0.0.1:80",
    )
    with (
        engine.application(
            llama, folder, "tensor-parallel", spawned_environ, "--tensor-parallel-size=2"
        ) as spawned,
        engine.application(llama, folder, "fork", forked_environ, "--fork", "--endless") as forked,
    ):
        forked.wait_for_result()
        session = engine.only_session(forked_sessions)
        (pid,) = engine.wait_for_engines(session, 1).values()
        running = "0,2,0,2,2,0,0,"  # two requests run, each computes a token
        engine.wait_for(
            "the endless round",
            lambda: running in (session / "scheduler_steps.csv").read_text()[-2000:],
            engine.END_SECONDS,
        )
        copy = engine.copy_journal(session, folder / "copy")
        sizes = [_journal_size(copy), engine.wait_for_growth(session)]
        engine.kill(pid)
        # vLLM 0.32 waits for ever for the answers of a killed engine, profiled or not.
        killed = Run(0, forked.text(), forked.result, forked_sessions)
        engine.wait_for(
            "the killed engine's session to be complete",
            lambda: engine.metadata(session).get("complete"),
            engine.on_this_machine(engine.SETTLED_SECONDS),
        )
        status = spawned.wait()
        tensor_parallel = Run(status, spawned.text(), spawned.result, spawned_sessions)
        engine.wait_until_settled(spawned_sessions)
    engine.wait_until_settled(forked_sessions)
    collector.finalize(copy)
    return tensor_parallel, KilledEngine(killed, engine.tables(copy), sizes[1] > sizes[0])
