# SPDX-License-Identifier: Apache-2.0
"""vLLM on one process's own distributed groups, and a stand-in for CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's parallel groups, of one rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        import torch
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.v1.worker import workspace

        store = tmp_path_factory.mktemp("groups") / "store"
        with set_current_vllm_config(VllmConfig()):
            parallel_state.init_distributed_environment(
                1, 0, f"file://{store}", local_rank=0, backend="gloo"
            )
            parallel_state.initialize_model_parallel()
            workspace.init_workspace_manager(torch.device("cpu"))
        yield
        workspace.reset_workspace_manager()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.fixture
def toys(groups: None) -> Any:
    """The module with toy models and runners, which imports vLLM."""
    return import_module("tests.graphs.toys")


@pytest.fixture
def cuda(groups: None) -> Iterator[Any]:
    """The stand-in, in place."""
    from tests.graphs.cuda import Cuda

    with Cuda() as cuda:
        yield cuda


@pytest.fixture
def recording(cuda: Any, tmp_path: Path) -> Iterator[Any]:
    """What records."""
    from tests.graphs.recording import Recording

    recording = Recording(tmp_path / "worker0.journal", cuda.graph_class)
    yield recording
    recording.recorder.close()


@pytest.fixture
def sessions(tmp_path: Path, cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where workers record to that are made in the test, of one GPU."""
    import torch
    from vllm.v1.worker import worker_base

    from profilemate.hooks.gpu import worker
    from tests.graphs.executor import GIB, UUID
    from tests.graphs.workers import Worker
    from tests.kv.recording import hooks_only

    gpu = SimpleNamespace(uuid=UUID, name="Toy GPU", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(Worker, "cuda", cuda)
    wrapper = worker_base.WorkerWrapperBase
    monkeypatch.setattr(wrapper, "init_worker", vars(wrapper)["init_worker"])
    with hooks_only(tmp_path / "sessions"):
        worker.attach(worker_base)
        yield tmp_path / "sessions"
