# SPDX-License-Identifier: Apache-2.0
"""Real engines, each started once and shared by the tests that look at what it did.

A start takes 20 to 40 s, most of it on one core, so engines are started two at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.server import Server
from tests.support.engine import START_SECONDS, Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Lab:
    """Where the engines run. vLLM's caches outlive them, unless pytest keeps none."""
    kept = getattr(pytestconfig, "cache", None)
    return Lab(tmp_path_factory.mktemp("lab"), kept and Path(kept.mkdir("engines")))


@pytest.fixture(scope="session")
def servers(lab: Lab) -> Iterator[tuple[Server, Server]]:
    """Two servers, started in the same moment, whose sessions go to one folder.

    The first refuses to start over a variable that it does not know, and has all of ours; it
    keeps vLLM's own metrics of every block.
    """
    here = {"VLLM_PROFILING_DIR": str(lab.sessions("servers"))}
    ours = {"VLLM_PROFILING": "1", "VLLM_ENABLE_PROFILING": "1", "VLLM_PROFILING_VERBOSE": "1"}
    strict = ("--fail-on-environ-validation",)
    metrics = ("--kv-cache-metrics", "--kv-cache-metrics-sample=1.0")
    with (
        lab.server("first", *strict, *metrics, **here, **ours) as first,
        lab.server("second", **here) as second,
    ):
        for server in (first, second):
            server.wait_until_ready(START_SECONDS)
        yield first, second
