# SPDX-License-Identifier: Apache-2.0
"""The environment that benchmarks run in: this repository on PYTHONPATH, and no network."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks.result import BenchmarkError

ROOT = Path(__file__).resolve().parent.parent

_LEFT_OUT = ("VLLM_PROFILING", "VLLM_ENABLE_PROFILING", "PYTHONDONTWRITEBYTECODE")
"""A process inherits no variable that begins so: ours, and what makes each start compile anew."""


def variables(sessions: Path, *, profiling: bool = True) -> dict[str, str]:
    """The variables of a process whose sessions go to the benchmark's folder."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)
    }
    return {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "VLLM_PROFILING": str(int(profiling)),
        "VLLM_PROFILING_DIR": str(sessions),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
    }


def attach_hooks() -> None:
    """Import vLLM with the hooks attached, if need be in this interpreter started anew.

    Schedulers that are made from then on are recorded where VLLM_PROFILING is 1 at that moment.

    Raises:
        BenchmarkError: vLLM is missing, or another sitecustomize keeps ours from running.

    """
    need_vllm()
    ready = os.environ.get("VLLM_PROFILING") == "1" and os.environ.get("PYTHONPATH") == str(ROOT)
    if not ready:
        sessions = Path(tempfile.gettempdir(), "unused")
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables(sessions))
    finders = {type(finder).__module__ for finder in sys.meta_path}
    if "profilemate.bootstrap" not in finders:
        raise BenchmarkError("the hooks are not loaded: another sitecustomize comes first")
    import_module("vllm.v1.core.sched.scheduler")


def need_vllm() -> None:
    """Raises BenchmarkError where there is no vLLM to measure."""
    if find_spec("vllm") is None:
        raise BenchmarkError("vLLM is not installed for this Python: make env, then make bench")


def cache() -> Path:
    """A folder of this user's for inputs that take long to make."""
    folder = Path(tempfile.gettempdir(), f"profilemate-benchmarks-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if folder.is_symlink() or info.st_uid != os.getuid():
        raise BenchmarkError(f"{folder} is not a folder of yours: set TMPDIR to one that is")
    return folder


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector would stop one side for what both left behind."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
