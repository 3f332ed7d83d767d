# SPDX-License-Identifier: Apache-2.0
"""How much memory of the workers' GPUs is in use, as NVML says while vLLM runs.

The collector's process asks NVML, never vLLM's, and does so in a thread: a call into the driver can
take long, or never return where a GPU has failed, and the journals must be followed all the same.
Nothing waits long for that thread, and it ends with the process.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from profilemate.format.folder import Folder
from profilemate.format.session import METADATA_FILE

TABLE = "gpu_memory.csv"

SHORTEST_SEC = 0.1
"""The shortest interval between samples, whatever is asked for."""

HANGS_SEC = 30.0
"""An answer that takes longer than this is a problem."""

PATIENCE_SEC = 1.0
"""How long the end of the session waits for the last answer."""

Header = Mapping[str, Any]
"""A worker's journal header."""

Name = str | int
"""A GPU's UUID or index, by which NVML finds it."""


@dataclass(frozen=True)
class Sampling:
    """How the sampling goes.

    Attributes:
        indexes: NVML's index of each GPU, by its name.
        problem: why some GPU is not sampled, or all are not; None where all are.

    """

    indexes: Mapping[Name, int]
    problem: str | None


class Sampler:
    """Samples the GPUs of the workers that it is given.

    ``load`` returns the pynvml module. It gets the paths at which vLLM may have its own copy.
    """

    def __init__(self, origin_ns: int, load: Callable[[Sequence[str]], Any] | None = None) -> None:
        self._origin = origin_ns
        self._load = load or load_nvml
        self._interval = 0.0
        self._copies: tuple[str, ...] = ()
        self._names: tuple[Name, ...] = ()
        self._handles: dict[Name, Any] = {}
        self._indexes: dict[Name, int] = {}
        self._problem: str | None = None
        self._asked: float | None = None
        self._rows: deque[str] = deque()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, workers: Sequence[Header]) -> None:
        """Sample the GPUs of these workers from now on. NVML is loaded for the first of them."""
        gpus = [worker["gpu"] for worker in workers if worker.get("gpu")]
        self._interval = interval_sec(workers)
        if not gpus or not self._interval:
            return
        names = [name for name in map(name_of, gpus) if name is not None]
        if len(names) < len(gpus):
            self._say("a worker's GPU has no UUID to find it by")
        self._names = tuple(dict.fromkeys(names))
        self._copies = tuple(str(worker["pynvml"]) for worker in workers if worker.get("pynvml"))
        if self._names and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpu_memory", daemon=True)
            self._thread.start()

    def rows(self) -> list[str]:
        """The rows that came since the last call."""
        return [self._rows.popleft() for _ in range(len(self._rows))]

    def state(self) -> Sampling:
        """How the sampling goes by now."""
        asked, problem = self._asked, self._problem
        if problem is None and asked is not None and time.monotonic() - asked > HANGS_SEC:
            problem = f"NVML has not answered for {time.monotonic() - asked:.0f} s"
        return Sampling(dict(self._indexes), problem)

    def stop(self) -> None:
        """Take no more samples. Waits for the one under way, but not for long."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(PATIENCE_SEC)

    def _run(self) -> None:
        self._asked = time.monotonic()
        try:
            nvml = self._load(self._copies)
            nvml.nvmlInit()
        except Exception as error:
            self._say(f"NVML cannot be used: {_text(error)}")
            self._asked = None
            return
        due = time.monotonic()
        while not self._ending.is_set():
            for name in self._names:
                self._asked = time.monotonic()
                self._sample(nvml, name)
            self._asked = None
            # Where a sample took longer than the interval, the next ones are not moved up.
            due = max(due + self._interval, time.monotonic())
            self._ending.wait(due - time.monotonic())

    def _sample(self, nvml: Any, name: Name) -> None:
        try:
            if name not in self._handles:
                self._handles[name], self._indexes[name] = _find(nvml, name)
            handle = self._handles[name]
            now = time.monotonic_ns()
            memory = _memory(nvml, handle)
            used, free = int(memory.used), int(memory.free)
        except Exception as error:
            self._handles.pop(name, None)
            gpu = f"GPU {name}" if isinstance(name, int) else name
            self._say(f"{gpu}: {_text(error)}")
            return
        self._rows.append(
            f"{(now - self._origin) / 1e9:.6f},{self._indexes[name]},{used},{free},"
            f"{_utilization(nvml, handle)}"
        )

    def _say(self, problem: str) -> None:
        """Keep the first problem: the later ones mostly follow from it."""
        self._problem = self._problem or problem


def name_of(gpu: Mapping[str, Any]) -> Name | None:
    """The name by which NVML finds a worker's GPU; None where the worker knows none.

    Without a UUID it is the entry of CUDA_VISIBLE_DEVICES at the GPU's index. CUDA and NVML number
    GPUs alike where all are of one kind.
    """
    if gpu.get("uuid"):
        return str(gpu["uuid"])
    index = gpu.get("index")
    if index is None or "visible" not in gpu:
        return None
    if not gpu["visible"]:
        return int(index)
    visible = str(gpu["visible"]).split(",")
    name = visible[index].strip() if index < len(visible) else ""
    return int(name) if name.isdecimal() else name or None


def interval_sec(workers: Sequence[Header]) -> float:
    """Seconds between samples, as the first worker was configured; 0: none are taken."""
    asked = float(workers[0].get("gpu_interval_sec") or 0) if workers else 0.0
    return max(SHORTEST_SEC, asked) if asked > 0 and math.isfinite(asked) else 0.0


def earlier_sampling(folder: Folder) -> Sampling:
    """How the sampling went, as the collector that followed this session noted in metadata.json."""
    try:
        metadata = json.loads(folder.read(METADATA_FILE))
        known = [gpu for gpu in metadata["gpus"] if gpu["uuid"] and gpu["gpu"] is not None]
        indexes: dict[Name, int] = {gpu["uuid"]: gpu["gpu"] for gpu in known}
        problem = (metadata["gpu_memory"] or {}).get("problem")
    except (OSError, ValueError, LookupError, TypeError):
        indexes, problem = {}, None
    if problem is None and not folder.has(TABLE):
        problem = "no collector followed the session, and only a collector takes samples"
    return Sampling(indexes, problem)


def load_nvml(copies: Sequence[str]) -> ModuleType:
    """The module pynvml: nvidia-ml-py where it is installed, else the copy that vLLM brings.

    Args:
        copies: files that may be vLLM's copy. Where none is, vLLM is looked up, not imported.

    Raises:
        ImportError: there is none.

    """
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        pass
    for path in [*copies, *_copies_of_vllm()]:
        spec = importlib.util.spec_from_file_location("pynvml", path)
        if Path(path).is_file() and spec is not None and spec.loader is not None:
            # The module looks itself up there.
            module = sys.modules["pynvml"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ImportError("nvidia-ml-py is not installed, and vLLM's copy of it was not found")


def _copies_of_vllm() -> list[str]:
    spec = importlib.util.find_spec("vllm")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return [str(Path(folder, "third_party", "pynvml.py")) for folder in folders]


def _find(nvml: Any, name: Name) -> tuple[Any, int]:
    """A GPU's handle and index. A part of a GPU (MIG) has its own handle, and the whole's index.

    CUDA has the same kind of UUID for both.
    """
    if isinstance(name, int):
        return nvml.nvmlDeviceGetHandleByIndex(name), name
    is_part = name.startswith("MIG-")
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(name)
    except Exception as error:
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(name.replace("GPU-", "MIG-", 1))
        except Exception:
            raise error from None
        is_part = True
    whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_part else handle
    return handle, int(nvml.nvmlDeviceGetIndex(whole))


def _memory(nvml: Any, handle: Any) -> Any:
    """Memory as nvidia-smi shows it: since version 2 ``used`` leaves out what is reserved."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    if version is not None:
        try:
            return nvml.nvmlDeviceGetMemoryInfo(handle, version)
        except Exception:
            pass  # The driver, or the module, is older than that.
    return nvml.nvmlDeviceGetMemoryInfo(handle)


def _utilization(nvml: Any, handle: Any) -> int | str:
    try:
        return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except Exception:
        return ""  # MIG has none, and some drivers forbid it.


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
