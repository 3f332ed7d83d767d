# SPDX-License-Identifier: Apache-2.0
"""GPU memory as NVML reports it: which GPUs, what is written, and what is wrong in one line.

No GPU is needed: an object with the functions of the module pynvml that are called is given to the
sampler in its place. All else is real, its thread too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from profilemate.collector import gpu_memory
from profilemate.collector.follower import Follower
from profilemate.collector.gpu_memory import Sampler
from profilemate.format import processes
from tests.collector.journals import MEMORY, WorkerJournal, metadata, rows

PATIENCE_SEC = 60
ROOT = Path(__file__).resolve().parent.parent.parent


class NvmlError(Exception):
    """What pynvml raises."""


class Nvml:
    """The functions of pynvml that are called, for GPUs that are in ``used`` by UUID."""

    NVMLError = NvmlError
    nvmlMemory_v2 = 0x02000028  # noqa: N815 (NVML's name)

    def __init__(self, **used: int) -> None:
        self.used = {uuid.replace("_", "-"): bytes_used for uuid, bytes_used in used.items()}
        self.broken: set[str] = set()
        self.asked: list[tuple[str, object]] = []

    def nvmlInit(self) -> None:  # noqa: N802
        self._ask("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self._ask("handle", uuid)
        if uuid not in self.used:
            raise NvmlError("Not Found")
        return uuid

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        self._ask("by index", index)
        return list(self.used)[index]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:  # noqa: N802
        return f"GPU-of-{handle}"

    def nvmlDeviceGetIndex(self, handle: str) -> int:  # noqa: N802
        self._ask("index", handle)
        return list(self.used).index(handle)

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> object:  # noqa: N802
        self._ask("memory_v2" if version else "memory", handle)
        reserved = 0 if version else 7
        used = self.used[handle]
        return SimpleNamespace(total=1_000, used=used + reserved, free=1_000 - used - 7)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> object:  # noqa: N802
        self._ask("utilization", handle)
        return SimpleNamespace(gpu=42, memory=1)

    def _ask(self, what: str, handle: object = None) -> None:
        self.asked.append((what, handle))
        if what in self.broken or handle in self.broken:
            raise NvmlError("GPU is lost" if handle in self.broken else "Not Supported")


def header(uuid: str | None, interval: float = 0.01) -> dict[str, Any]:
    return {"gpu": {"uuid": uuid, "index": 0}, "gpu_interval_sec": interval, "pynvml": None}


@contextmanager
def sampling(nvml: Any, *uuids: str | None, interval: float = 0.01) -> Iterator[Sampler]:
    """A sampler of these GPUs, at work, whose session began now."""
    sampler = Sampler(time.monotonic_ns(), load=lambda copies: nvml)
    sampler.watch([header(uuid, interval) for uuid in uuids])
    try:
        yield sampler
    finally:
        sampler.stop()


def until(found: Callable[[], Any]) -> Any:
    """Wait until ``found`` returns something true, and return that."""
    give_up = time.monotonic() + PATIENCE_SEC
    while not (it := found()):
        assert time.monotonic() < give_up
        time.sleep(0.01)
    return it


def take(sampler: Sampler, count: int) -> list[list[str]]:
    """The cells of the next rows, but for when they were sampled."""
    taken: list[str] = []
    until(lambda: taken.extend(sampler.rows()) or len(taken) >= count)
    return [row.split(",")[1:] for row in taken[:count]]


def test_rows_of_two_gpus() -> None:
    """In turn, each by its UUID, with NVML's own index; memory as nvidia-smi shows it."""
    nvml = Nvml(GPU_other=1, GPU_a=300, GPU_b=500)
    with sampling(nvml, "GPU-a", "GPU-b", "GPU-a") as sampler:
        assert take(sampler, 4) == [["1", "300", "693", "42"], ["2", "500", "493", "42"]] * 2
        assert sampler.state().indexes == {"GPU-a": 1, "GPU-b": 2}
        assert sampler.state().problem is None
    assert nvml.asked[:3] == [("init", None), ("handle", "GPU-a"), ("index", "GPU-a")]
    assert ("memory", "GPU-a") not in nvml.asked


def test_times_are_of_the_session() -> None:
    began = time.monotonic()
    with sampling(Nvml(GPU_a=1), "GPU-a") as sampler:
        sampled: list[str] = []
        until(lambda: sampled.extend(sampler.rows()) or len(sampled) >= 3)
    seconds = [float(row.split(",")[0]) for row in sampled]
    assert seconds == sorted(seconds)
    assert 0 <= seconds[0] <= seconds[-1] <= time.monotonic() - began


@pytest.mark.parametrize(
    ("asked", "used"), [(0, 0), (0.01, 0.1), (0.1, 0.1), (2.5, 2.5), (None, 0), (-1, 0)]
)
def test_never_faster_than_ten_times_a_second(asked: float | None, used: float) -> None:
    assert gpu_memory.interval_sec([{"gpu_interval_sec": asked}, header("GPU-a", 3)]) == used


def test_worker_that_comes_later() -> None:
    with sampling(Nvml(GPU_a=1, GPU_b=2), "GPU-a") as sampler:
        assert take(sampler, 1) == [["0", "1", "992", "42"]]
        sampler.watch([header("GPU-a"), header("GPU-b")])
        until(lambda: "GPU-b" in sampler.state().indexes)
        until(lambda: any(row.split(",")[1] == "1" for row in sampler.rows()))


@pytest.mark.parametrize("how", ["driver", "module", "older module"])
def test_version_1_where_there_is_no_other(how: str) -> None:
    nvml: Any = Nvml(GPU_a=300)
    if how == "driver":
        nvml.broken = {"memory_v2"}
    elif how == "module":
        nvml.nvmlMemory_v2 = None
    else:
        of_today = nvml.nvmlDeviceGetMemoryInfo

        def older(handle: str) -> Any:
            return of_today(handle)

        nvml.nvmlDeviceGetMemoryInfo = older
    with sampling(nvml, "GPU-a") as sampler:
        assert take(sampler, 1) == [["0", "307", "693", "42"]]
        assert sampler.state().problem is None


def test_only_the_utilization_is_missing() -> None:
    nvml = Nvml(GPU_a=300)
    nvml.broken = {"utilization"}
    with sampling(nvml, "GPU-a") as sampler:
        assert take(sampler, 1) == [["0", "300", "693", ""]]
        assert sampler.state().problem is None


@pytest.mark.parametrize("name", ["GPU-a-0", "MIG-a-0"])
def test_part_of_a_gpu(name: str) -> None:
    """MIG: CUDA's UUID is NVML's but for its first letters; the index is that of the whole."""
    nvml = Nvml(GPU_b=1, GPU_of_MIG_a_0=2, MIG_a_0=300)
    nvml.broken = {"utilization"}
    with sampling(nvml, name) as sampler:
        assert take(sampler, 1) == [["1", "300", "693", ""]]
        assert sampler.state().indexes == {name: 1}


@pytest.mark.parametrize(
    ("index", "visible", "name"),
    [
        (0, None, 0),
        (2, "", 2),
        (1, "3, 5", 5),
        (0, "GPU-b", "GPU-b"),
        (2, "3,5", None),
        (None, "3", None),
    ],
)
def test_gpu_whose_uuid_is_not_known(
    index: int | None, visible: str | None, name: str | int | None
) -> None:
    """It is found by its place in CUDA_VISIBLE_DEVICES."""
    gpu = {"uuid": None, "index": index, "visible": visible}
    assert gpu_memory.name_of(gpu) == name
    assert gpu_memory.name_of({**gpu, "uuid": "GPU-a"}) == "GPU-a"


def test_gpu_by_its_index() -> None:
    sampler = Sampler(0, lambda copies: Nvml(GPU_a=1, GPU_b=2))
    gpu = {"uuid": None, "index": 0, "visible": "1"}
    sampler.watch([{"gpu": gpu, "gpu_interval_sec": 1}])
    assert take(sampler, 1) == [["1", "2", "991", "42"]]
    sampler.stop()


def test_gpu_that_vanishes_and_comes_back() -> None:
    """The reason is said once, the other GPU goes on, and so does this one in the end."""
    nvml = Nvml(GPU_a=1, GPU_b=2)
    with sampling(nvml, "GPU-a", "GPU-b") as sampler:
        take(sampler, 2)
        nvml.broken = {"GPU-a"}
        until(lambda: sampler.state().problem)
        sampler.rows()
        assert [cells[0] for cells in take(sampler, 2)] == ["1", "1"]
        # From now on it is looked for anew, which fails in another way.
        nvml.broken = {"handle"}
        before = nvml.asked.count(("handle", "GPU-a"))
        until(lambda: nvml.asked.count(("handle", "GPU-a")) > before + 1)
        nvml.broken = set()
        until(lambda: any(row.split(",")[1] == "0" for row in sampler.rows()))
        assert sampler.state().problem == "GPU-a: NvmlError: GPU is lost"


def test_gpu_that_is_lost_from_the_beginning() -> None:
    nvml = Nvml(GPU_a=1)
    nvml.broken = {"GPU-a"}
    with sampling(nvml, "GPU-a") as sampler:
        assert until(lambda: sampler.state().problem) == "GPU-a: NvmlError: GPU is lost"


def test_gpu_that_nvml_does_not_know() -> None:
    with sampling(Nvml(GPU_a=1), "GPU-b") as sampler:
        assert until(lambda: sampler.state().problem) == "GPU-b: NvmlError: Not Found"
        assert not sampler.rows()


def test_index_that_nvml_does_not_know() -> None:
    nvml = Nvml()
    nvml.broken = {"by index"}
    sampler = Sampler(0, lambda copies: nvml)
    gpu = {"uuid": None, "index": 0, "visible": "3"}
    sampler.watch([{"gpu": gpu, "gpu_interval_sec": 1}])
    assert until(lambda: sampler.state().problem) == "GPU 3: NvmlError: Not Supported"
    sampler.stop()


def test_gpu_without_a_name() -> None:
    """There is nothing to find it by: CUDA's own index is not NVML's."""
    with sampling(Nvml(GPU_a=1), None) as sampler:
        assert sampler.state().problem == "a worker's GPU has no UUID to find it by"
        assert not sampler.rows()
    with sampling(Nvml(GPU_a=1), None, "GPU-a") as sampler:
        assert take(sampler, 1) == [["0", "1", "992", "42"]]


def test_nvml_that_may_not_be_used() -> None:
    nvml = Nvml(GPU_a=1)
    nvml.broken = {"init"}
    with sampling(nvml, "GPU-a") as sampler:
        problem = until(lambda: sampler.state().problem)
        assert problem == "NVML cannot be used: NvmlError: Not Supported"


def test_nvml_that_is_missing() -> None:
    def load(copies: Sequence[str]) -> Any:
        raise ImportError(f"none in {list(copies)}")

    sampler = Sampler(0, load)
    sampler.watch([{**header("GPU-a"), "pynvml": "/vllm/pynvml.py"}])
    problem = until(lambda: sampler.state().problem)
    assert problem == "NVML cannot be used: ImportError: none in ['/vllm/pynvml.py']"
    assert not sampler.rows()


@pytest.mark.parametrize("workers", [[], [{"gpu": None}], [header("GPU-a", interval=0)]])
def test_nothing_to_sample(workers: list[dict[str, Any]]) -> None:
    """No thread, and NVML is not even loaded."""

    def load(copies: Sequence[str]) -> Any:
        raise AssertionError("loaded")

    before = threading.active_count()
    sampler = Sampler(0, load)
    sampler.watch(workers)
    assert threading.active_count() == before
    assert sampler.state() == gpu_memory.Sampling({}, None)
    sampler.stop()


def test_call_that_never_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journals are followed to their end all the same, and the session says what hung."""
    monkeypatch.setattr(gpu_memory, "PATIENCE_SEC", 0.0)
    monkeypatch.setattr(gpu_memory, "HANGS_SEC", 0.0)
    nvml, release = Nvml(GPU_a=1), threading.Event()
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: release.wait()  # type: ignore[method-assign]
    worker = WorkerJournal(tmp_path, **header("GPU-a"))
    worker.batch(0, 1, ("NONE", 8, None, 0, 0))
    worker.executed(1_000, 1, tokens=8)
    worker.killed()
    target = tmp_path / "tables"
    target.mkdir()
    follower = Follower(worker.folder, target, Sampler(0, lambda copies: nvml))
    follower.discover()
    follower.read()
    follower.sample()
    until(lambda: ("memory_v2", "GPU-a") in nvml.asked)
    follower.close()
    release.set()
    assert len(rows(target, "cuda_graph_timeline.csv")) == 1
    assert metadata(target)["gpu_memory"]["problem"].startswith("NVML has not answered for ")
    assert not (target / MEMORY).exists()


def test_table_and_metadata(tmp_path: Path) -> None:
    """What a follower with a sampler writes."""
    worker = WorkerJournal(tmp_path, **header("GPU-a", interval=0.2))
    worker.killed()
    target = tmp_path / "tables"
    target.mkdir()
    follower = Follower(worker.folder, target, Sampler(0, lambda copies: Nvml(GPU_a=300)))
    follower.discover()
    follower.read()

    def sampled() -> bool:
        follower.sample()
        follower.apply()
        return (target / MEMORY).exists() and len(rows(target, MEMORY)) > 1

    until(sampled)
    follower.close()
    header_line, *lines = (target / MEMORY).read_text().splitlines()
    assert header_line == "timestamp_sec,gpu,used_bytes,free_bytes,utilization_pct"
    assert {line.partition(",")[2] for line in lines} == {"0,300,693,42"}
    assert (target / MEMORY).stat().st_mode & 0o777 == 0o600
    found = metadata(target)
    assert found["gpu_memory"] == {"interval_sec": 0.2, "problem": None}
    assert found["gpus"] == [
        {"gpu": 0, "uuid": "GPU-a", "name": None, "total_bytes": None, "workers": [0]}
    ]


def isolated(code: str, *arguments: str) -> str:
    """What a Python without anything but this repository prints."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    command = [sys.executable, "-I", "-S", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


COPY = "import sys\nsys.modules[__name__].where = __file__\n"
LOAD = """
from profilemate.collector.gpu_memory import load_nvml
try:
    print(getattr(load_nvml(sys.argv[1:]), "where", "installed"))
except ImportError as error:
    print(error)
print("vllm" in sys.modules)
"""


def test_copy_that_vllm_brings(tmp_path: Path) -> None:
    """Found without importing vLLM: where a worker says, or where vLLM is installed."""
    package = tmp_path / "vllm"
    (package / "third_party").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    copy = package / "third_party" / "pynvml.py"
    copy.write_text(COPY)
    on_path = f"sys.path.insert(0, {str(tmp_path)!r})\n"
    gone = str(tmp_path / "gone.py")
    assert isolated(LOAD, gone, str(copy)) == f"{copy}\nFalse\n"
    assert isolated(on_path + LOAD, gone) == f"{copy}\nFalse\n"
    missing = "nvidia-ml-py is not installed, and vLLM's copy of it was not found"
    assert isolated(LOAD, gone) == f"{missing}\nFalse\n"
    (tmp_path / "pynvml.py").write_text("")
    assert isolated(on_path + LOAD, str(copy)) == "installed\nFalse\n"


def test_collector_beside_a_worker_without_nvml(tmp_path: Path) -> None:
    """The real collector, on a GPU that no machine has: the tables, and why there is no sample."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    start = processes.start_of(process.pid)
    worker = WorkerJournal(
        tmp_path, pid=process.pid, start=start, **header("GPU-00000000-0000-0000-0000-000000000000")
    )
    worker.batch(0, 1, ("NONE", 8, None, 0, 0))
    worker.executed(1_000, 1, tokens=8)
    worker.killed()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "profilemate.collector", str(worker.folder)]
    with subprocess.Popen(command, env=environment) as collector:

        def problem() -> Any:
            path = worker.folder / "metadata.json"
            found = json.loads(path.read_bytes()) if path.exists() else {}
            return (found.get("gpu_memory") or {}).get("problem")

        said = until(problem)
        process.communicate(b"\n")
        assert collector.wait(PATIENCE_SEC) == 0
    found = metadata(worker.folder)
    assert found["complete"]
    assert found["gpu_memory"]["problem"] == said
    assert len(rows(worker.folder, "cuda_graph_timeline.csv")) == 1
    assert not (worker.folder / MEMORY).exists()
