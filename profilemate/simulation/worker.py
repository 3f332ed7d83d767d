# SPDX-License-Identifier: Apache-2.0
"""What does a process do that replays configurations, one after the other?

It imports vLLM once, which takes longer than many a replay. It is told a configuration at a time
and answers with what came of it. Nothing of ours records here, no GPU is looked for, nothing is
fetched, and what libraries print goes nowhere.
"""

from __future__ import annotations

import functools
import gc
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from analysis.whatif.clock import StepTime
from analysis.whatif.configuration import Configuration
from analysis.whatif.prefixes import Prefixes
from analysis.whatif.workload import Workload
from profilemate.simulation.figures import Figures

PROGRESS_SEC = 0.2

LONGEST_REASON = 400

ENVIRONMENT = {
    "VLLM_PROFILING": "0",
    # The scheduler is the same on each; this one is there without any device.
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
    """What all configurations have in common: the requests and what tells them apart by less than a
    block, the time of a step, and when the warm-up ends."""

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
    """What came of a configuration, and the release of vLLM that replayed it."""

    figures: Figures
    vllm: str


@dataclass(frozen=True)
class Failed:
    """Why nothing came of a configuration."""

    reason: str


Message = Progress | Done | Failed


def work(connection: Connection, task: Task, folder: Path) -> None:
    """Replay each configuration that comes; what files that takes go into the folder."""
    _be_quiet(folder)
    # Nobody is left to be told when either of these comes.
    with suppress(EOFError, BrokenPipeError):
        while True:
            configuration = connection.recv()
            connection.send(_answer(folder, configuration, task, connection))


def _be_quiet(folder: Path) -> None:
    # What vLLM would keep of a model for later is not true of the user's.
    caches = {
        name: str(folder / "cache") for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
    }
    os.environ.update(ENVIRONMENT | caches)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _answer(
    folder: Path, configuration: Configuration, task: Task, connection: Connection
) -> Message:
    try:
        return _replayed(folder, configuration, task, connection)
    except (EOFError, BrokenPipeError):
        raise
    except Exception as error:
        return Failed(_reason(error))


def _replayed(
    folder: Path, configuration: Configuration, task: Task, connection: Connection
) -> Done:
    version = _vllm()
    from profilemate.simulation import parts
    from profilemate.simulation.engine import Engine

    model = parts.write_model(folder, max_position_embeddings=configuration.max_model_len)
    gc.collect()
    # Going through all that vLLM has loaded takes long, each time.
    gc.freeze()
    ended, told = 0, time.monotonic()

    def one_ended() -> None:
        nonlocal ended, told
        ended += 1
        if time.monotonic() > told + PROGRESS_SEC:
            told = time.monotonic()
            connection.send(Progress(ended))

    figures = Figures()
    for number in task.workload.engines:
        figures += Engine(
            model,
            configuration,
            task.workload.of_engine(number),
            task.step_time,
            prefixes=task.prefixes.of_engine(number) if task.prefixes else None,
            begin_sec=task.begin_sec,
            ended=one_ended,
        ).run()
    return Done(figures, version)


@functools.cache
def _vllm() -> str:
    """Import vLLM, once; returns its release."""
    from profilemate.simulation import parts

    parts.prepare_libraries()
    import vllm

    parts.tell_of_the_model()
    return str(vllm.__version__)


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split())
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 3]}..."
