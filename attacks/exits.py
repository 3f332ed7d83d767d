# SPDX-License-Identifier: Apache-2.0
"""How a process with the real scheduler ends, with and without recording: exit code, output,
signals, threads, descriptors, children.

One process imports vLLM, once with us and once without. Its forks make a scheduler, work, and end
as real processes do: the whole of Python's shutdown runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from attacks.figure import Figure
from tests.bootstrap.conftest import ROOT
from tests.support.scheduler import write_model

ENDINGS = {
    "the end": "pass",
    "sys.exit(3)": "sys.exit(3)",
    "an exception": "1 / 0",
    "os._exit(7)": "os._exit(7)",
    "os.abort()": "os.abort()",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "SIGINT": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL); time.sleep(60)",
    "SIGHUP": "os.kill(os.getpid(), signal.SIGHUP); time.sleep(60)",
    "a stack overflow": "exec('def deep(): deep()\\ndeep()')",
    "a crash": "import ctypes; ctypes.string_at(0)",
    "the end of a thread": "threading.Thread(target=sys.exit, args=(6,)).start()",
    "atexit": "import atexit; atexit.register(os._exit, 5)",
    "SIGTERM that is handled": "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); "
    "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
}

ZYGOTE = """
import json, os, signal, subprocess, sys, threading, time
from pathlib import Path
sys.path.insert(0, os.environ["TESTS"])
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
import vllm.v1.core.sched.scheduler
from tests.kv.transcript import arrivals, transcript
from tests.support.scheduler import build_scheduler

folder, model = Path(sys.argv[1]), Path(sys.argv[2])
endings = json.loads(sys.argv[3])


def state():
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        flags = Path(f"/proc/self/fdinfo/{name}").read_text().split("flags:")[1].split()[0]
        descriptors[name] = [target, bool(int(flags, 8) & os.O_CLOEXEC)]
    return {
        "descriptors": descriptors,
        "handlers": [str(signal.getsignal(number)) for number in range(1, 32)],
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "threads": len(os.listdir("/proc/self/task")),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(),
        "inherited": subprocess.run(
            [sys.executable, "-ISc", "import os; print(sorted(os.listdir('/proc/self/fd')))"],
            capture_output=True, text=True, close_fds=False,
        ).stdout,
    }


results = {}
for number, (name, ending) in enumerate(endings.items()):
    streams = folder / str(number)
    pid = os.fork()
    if not pid:
        for fd, stream in ((1, "out"), (2, "err")):
            opened = os.open(f"{streams}.{stream}", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(opened, fd)
            os.close(opened)
        before = state()
        scheduler = build_scheduler(model, 24)
        transcript(scheduler, arrivals(6))
        time.sleep(0.05)
        Path(f"{streams}.state").write_text(json.dumps([before, state()]))
        break
    results[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
else:
    Path(folder, "results").write_text(json.dumps(results))
    os._exit(0)
exec(ending)
"""


def run(count: int, seed: int, folder: Path) -> list[Figure]:
    """Each ending ``count`` times."""
    model = write_model(folder / "model")
    worse: dict[str, float] = dict.fromkeys(
        ("codes", "outputs", "lines", "state", "descriptors", "inherited", "zombies"), 0
    )
    alive = 0
    for number in range(count):
        found = []
        for recorded in (False, True):
            made = folder / f"{number}-{recorded}"
            made.mkdir()
            found.append(_end(made, model, recorded=recorded))
        for at, name in enumerate(ENDINGS):
            without, with_us = (each[at] for each in found)
            _compare(name, without, with_us, worse)
        alive += _collectors_that_stay(folder)
    return [
        Figure("endings", count * len(ENDINGS)),
        Figure("exit codes that differ", worse["codes"], most=0),
        Figure("outputs that differ", worse["outputs"], most=0),
        Figure("most lines more on stderr", worse["lines"], most=1),
        Figure("signal handlers or masks that differ", worse["state"], most=0),
        Figure("most descriptors more in a process", worse["descriptors"], most=1),
        Figure("descriptors that a child inherits", worse["inherited"], most=0),
        Figure("children and zombies more", worse["zombies"], most=0),
        Figure("collectors that stay", alive, most=0),
    ]


Ended = dict[str, Any]


def _end(folder: Path, model: Path, *, recorded: bool) -> list[Ended]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VLLM_"))
    }
    environ = {**kept, "TESTS": str(ROOT), "VLLM_PROFILING_DIR": str(folder / "sessions")}
    if recorded:
        environ["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", ZYGOTE, str(folder), str(model), json.dumps(ENDINGS)]
    subprocess.run(command, env=environ, cwd=folder, check=True, stdin=subprocess.DEVNULL)
    results = json.loads((folder / "results").read_text())
    return [
        {
            "code": code,
            "out": (folder / f"{at}.out").read_bytes(),
            "err": (folder / f"{at}.err").read_text().splitlines(),
            "state": json.loads((folder / f"{at}.state").read_text()),
        }
        for at, code in enumerate(results.values())
    ]


def _compare(name: str, without: Ended, with_us: Ended, worse: dict[str, float]) -> None:
    states = [each["state"][1] for each in (without, with_us)]

    def differ(name: str) -> bool:
        return bool(states[0][name] != states[1][name])

    differs = {
        "codes": without["code"] != with_us["code"],
        "outputs": without["out"] != with_us["out"],
        "state": differ("handlers") or differ("blocked"),
        "inherited": differ("inherited"),
        "zombies": differ("children"),
    }
    for each, is_so in differs.items():
        worse[each] += is_so
    counted = [len(state["descriptors"]) for state in states]
    more = {
        "lines": len(with_us["err"]) - len(without["err"]),
        "descriptors": counted[1] - counted[0],
    }
    for each, value in more.items():
        worse[each] = max(worse[each], value)
    threads = [state["threads"] for state in states]
    wrong = [each for each, is_so in differs.items() if is_so]
    print(f"{name}: exit code {with_us['code']}, threads {threads}, {more}, {wrong or 'the same'}")
    if more["lines"] > 0:
        print("\n".join(with_us["err"][-5:]))


def _collectors_that_stay(folder: Path, patience_sec: float = 60) -> int:
    until = time.monotonic() + patience_sec
    while (alive := _collectors(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return len(alive)


def _collectors(folder: Path) -> list[int]:
    """Processes whose command line names the folder, other than this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in command and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found
