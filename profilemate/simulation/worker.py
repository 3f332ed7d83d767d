# SPDX-License-Identifier: Apache-2.0
"""What does a process do that simulates configurations, one after the other?

It imports vLLM once, which takes longer than many a simulation. It gets one configuration at a time
and answers with the result. Here profilemate records nothing, nothing looks for a GPU or fetches
anything, and what libraries print goes nowhere.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from analysis.whatif.clock import StepTime
from analysis.whatif.configuration import Configuration
from analysis.whatif.prefixes import Prefixes
from analysis.whatif.workload import Workload
from profilemate.simulation.figures import Figures
from profilemate.simulation.words import said

PROGRESS_SEC = 0.2

LONGEST_REASON = 400

ENVIRONMENT = {
    "VLLM_PROFILING": "0",
    # The scheduler is the same on every device, and this one needs none.
    "VLLM_TARGET_DEVICE": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Task:
    """What all configurations have in common: the requests, the ids of their prefixes, the time of
    a step, and the end of the warm-up."""

    workload: Workload
    step_time: StepTime
    begin_sec: float = 0.0
    prefixes: Prefixes | None = None


@dataclass(frozen=True)
class Progress:
    """Requests that have ended so far."""

    ended: int


@dataclass(frozen=True)
class Done:
    """The figures of a configuration, and the release of vLLM that simulated it."""

    figures: Figures
    vllm: str


@dataclass(frozen=True)
class Failed:
    """Why a configuration has no figures."""

    reason: str


Message = Progress | Done | Failed


def work(connection: Connection, folder: Path) -> None:
    """Simulate each configuration that comes, with the file that has its task. Other files go into
    the folder."""
    be_quiet(folder)
    # It takes long, and often nothing has come yet. What fails now fails again for a reason that
    # the first configuration gets.
    with suppress(Exception):
        _vllm()
    # Either of these says that the other process is gone.
    with suppress(EOFError, BrokenPipeError):
        while True:
            path, configuration = connection.recv()
            connection.send(simulated(folder, configuration, _task(path), connection.send))


@functools.cache
def _task(path: Path) -> Task:
    task: Task = pickle.loads(path.read_bytes())
    return task


def be_quiet(folder: Path) -> None:
    """Let this process record, fetch and print nothing. Caches go into the folder."""
    # What vLLM caches about this model must not be taken for the user's.
    caches = {
        name: str(folder / "cache") for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
    }
    os.environ.update(ENVIRONMENT | caches)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def simulated(
    folder: Path, configuration: Configuration, task: Task, tell: Callable[[Progress], None]
) -> Done | Failed:
    """Simulate one configuration in this process, which is quiet.

    Args:
        folder: for files.
        configuration: what is simulated.
        task: what all configurations have in common.
        tell: takes how far it has come, now and then.

    """
    try:
        return _simulated(folder, configuration, task, tell)
    except (EOFError, BrokenPipeError):
        raise
    except Exception as error:
        return Failed(_reason(error))


def _simulated(
    folder: Path, configuration: Configuration, task: Task, tell: Callable[[Progress], None]
) -> Done:
    version = _vllm()
    from profilemate.simulation import parts
    from profilemate.simulation.engine import Engine

    model = parts.write_model(folder, max_position_embeddings=configuration.max_model_len)
    gc.collect()
    # Without this each collection would search all that vLLM has loaded.
    gc.freeze()
    ended, sent_at = 0, time.monotonic()

    def one_ended() -> None:
        nonlocal ended, sent_at
        ended += 1
        if time.monotonic() > sent_at + PROGRESS_SEC:
            sent_at = time.monotonic()
            tell(Progress(ended))

    figures = Figures()
    for number in task.workload.engines:
        own = np.flatnonzero(task.workload.engine == number)
        figures += Engine(
            model,
            configuration,
            task.workload.of_engine(number),
            task.step_time,
            prefixes=task.prefixes.of_engine(number) if task.prefixes else None,
            begin_sec=task.begin_sec,
            numbers=own.tolist(),
            ended=one_ended,
        ).run()
    return Done(figures, version)


@functools.cache
def _vllm() -> str:
    """Import vLLM, once; returns its release."""
    from profilemate.simulation import parts

    parts.prepare_libraries()
    import vllm

    parts.describe_the_model()
    return str(vllm.__version__)


def _reason(error: Exception) -> str:
    name, text = type(error).__name__, said(error)
    # Of pydantic's errors only what vLLM itself says is left.
    if name != "ValidationError":
        text = f"{name}: {text}" if text else name
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 3]}..."
