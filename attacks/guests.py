# SPDX-License-Identifier: Apache-2.0
"""Other tools in the same process: real ones around an interpreter, and made-up ones of every form,
two at a time, around the real scheduler and block pool.

The real ones are fetched into an environment of their own (network). They import a small package
called vllm, in which the hooks wait for the same modules.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from attacks.figure import Figure
from tests.bootstrap.conftest import ROOT, User, new_user, unindent
from tests.kv.beside import PLACES
from tests.kv.test_guests import run as run_beside
from tests.support.guests import FORMS
from tests.support.scheduler import write_model

PACKAGES = (
    "wrapt",
    "orjson",
    "ddtrace",
    "opentelemetry-distro",
    "opentelemetry-instrumentation-threading",
    "opentelemetry-instrumentation-logging",
    "coverage",
    "sentry-sdk",
)

SHELL = ["sh", "-c", 'PYTHONPATH="$OURS:$PYTHONPATH" exec "$@"', "sh"]
"""Puts profilemate before what a tool has put on the path."""

TOOLS: dict[str, list[str]] = {
    "alone": ["{python}"],
    "ddtrace-run": ["{bin}/ddtrace-run", "{python}"],
    "opentelemetry-instrument": ["{bin}/opentelemetry-instrument", *SHELL, "{python}"],
    "opentelemetry-instrument ddtrace-run": [
        "{bin}/opentelemetry-instrument",
        "{bin}/ddtrace-run",
        *SHELL,
        "{python}",
    ],
    "ddtrace-run opentelemetry-instrument": [
        "{bin}/ddtrace-run",
        "{bin}/opentelemetry-instrument",
        *SHELL,
        "{python}",
    ],
    "coverage run": ["{bin}/coverage", "run"],
}

QUIET = {
    "OTEL_TRACES_EXPORTER": "none",
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_LOGS_EXPORTER": "none",
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
    "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    "DD_TRACE_STARTUP_LOGS": "false",
    "DD_TRACE_AGENT_URL": "http://127.0.0.1:9",
    # Its own hooks want more of vLLM than the small package has.
    "DD_TRACE_VLLM_ENABLED": "false",
}

ENGINE = """
    class Scheduler:
        def __init__(self, *args, **kwargs): pass
    """
CORE = """
    from vllm.v1.core.sched.scheduler import Scheduler
    class EngineCore:
        def __init__(self): self.scheduler = None
    """
WORKER = """
    class WorkerWrapperBase:
        def init_worker(self): pass
    """

SCRIPT = """
    import multiprocessing, subprocess, sys
    {first}

    def attached():
        import vllm.v1.engine.core, vllm.v1.worker.worker_base
        try:
            from profilemate import hooks
            return sum(status.attached for status in hooks.status())
        except ImportError:
            return 0

    def child(way):
        print("attached", way, attached(), flush=True)

    if __name__ == "__main__":
        child("own")
        process = multiprocessing.get_context("spawn").Process(target=child, args=("spawn",))
        process.start()
        process.join()
        code = "import runpy, sys; runpy.run_path(sys.argv[1])['child']('subprocess')"
        subprocess.run([sys.executable, "-c", code, __file__], check=True)
        sys.exit(3)
    """
SENTRY = "import sentry_sdk; sentry_sdk.init()"


def run(count: int, seed: int, folder: Path) -> list[Figure]:
    """``count`` pairs of made-up tools, and each of the real ones in each order."""
    real = _real(folder)
    pairs = _pairs(count, seed, folder)
    return [
        Figure("real tools, in each order", real["runs"]),
        Figure("processes without their hooks", real["unattached"], most=0),
        Figure("exit codes that differ", real["codes"], most=0),
        Figure("outputs that differ", real["outputs"], most=0),
        Figure("pairs of made-up tools", count),
        Figure("pairs with which vLLM did something else", pairs["did"], most=0),
        Figure("pairs with other tables", pairs["tables"], most=0),
        Figure("pairs that cost a part, or a line", pairs["lines"], most=0),
    ]


def _real(folder: Path) -> Counter[str]:
    binaries = _install(folder / "environment")
    counts: Counter[str] = Counter(dict.fromkeys(("runs", "unattached", "codes", "outputs"), 0))
    folder = folder / "users"
    folder.mkdir()
    for number, (name, command) in enumerate(TOOLS.items()):
        for first in ("pass", SENTRY):
            user = _user(folder / f"{number}-{len(first)}", first)
            found = [_run(user, binaries, command, recorded=yes) for yes in (False, True)]
            without, with_us = found
            lines = [line.split()[1:] for line in with_us.stdout.splitlines()]
            attached = {way: int(number) for way, number in lines}
            counts["runs"] += 1
            counts["unattached"] += 3 - sum(attached.get(way) == HOOKS for way in WAYS)
            counts["codes"] += without.returncode != with_us.returncode or with_us.returncode != 3
            # Tools write times and process numbers; only whole lines of ours would be more.
            more = with_us.stderr.count("\n") - without.stderr.count("\n")
            counts["outputs"] += more > 0
            print(f"{name}, {'sentry' if first == SENTRY else 'no sentry'}: {attached}, {more}")
    return counts


WAYS = ("own", "spawn", "subprocess")
HOOKS = 3
"""Of the modules that the script imports."""


def _user(folder: Path, first: str) -> User:
    folder.mkdir()
    user = new_user(folder, folder / "bytecode")
    user.write_vllm(probes=False)
    user.write("vllm/v1/core/sched/scheduler", ENGINE)
    user.write("vllm/v1/engine/core", CORE)
    user.write("vllm/v1/worker/worker_base", WORKER)
    (user.work / "script.py").write_text(unindent(SCRIPT).format(first=first))
    return user


def _run(
    user: User, binaries: Path, command: list[str], *, recorded: bool
) -> subprocess.CompletedProcess[str]:
    ours = str(ROOT) if recorded else str(user.temporary)
    path = os.pathsep.join((ours, str(user.site)))
    filled = [each.format(bin=binaries, python=binaries / "python") for each in command]
    return subprocess.run(
        [*filled, str(user.work / "script.py")],
        env=user.environment({"PYTHONPATH": path, "OURS": ours, **QUIET}),
        cwd=user.work,
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )


def _install(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *PACKAGES]
    subprocess.run(pip, check=True)
    return folder / "bin"


def _pairs(count: int, seed: int, folder: Path) -> Counter[str]:
    chosen = random.Random(seed)
    model = write_model(folder / "model")
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        alone = run_beside(_made(folder / "alone"), model, [])
        for number in range(count):
            tools = [(chosen.choice(PLACES), chosen.choice(FORMS)) for _ in range(2)]
            did, _, tables, metadata, lines = run_beside(_made(folder / str(number)), model, tools)
            wrong = {
                "did": did != alone[0],
                "tables": tables != alone[2],
                "lines": bool(lines) or not metadata["complete"],
            }
            counts.update(name for name, is_wrong in wrong.items() if is_wrong)
            if any(wrong.values()):
                print(f"pair {number}: {tools}: {wrong} {lines}")
    return counts


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
