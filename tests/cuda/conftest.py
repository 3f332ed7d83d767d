# SPDX-License-Identifier: Apache-2.0
"""Whole engines of vLLM's CUDA build: docs/cuda.md says how to run them.

A variable says how to reach a GPU. Without it they could only fail, so they are not collected.
"""

from __future__ import annotations

import os

import pytest

from tests.cuda.lab import RUN, CudaLab

collect_ignore_glob = [] if os.environ.get(RUN) else ["test_*.py"]


@pytest.fixture(scope="session")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> CudaLab:
    """Where the engines run."""
    return CudaLab(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="session", params=["V1", "V2"])
def runner(request: pytest.FixtureRequest) -> str:
    """vLLM's model runner."""
    return str(request.param)
