# SPDX-License-Identifier: Apache-2.0
"""A real engine with vLLM's own offloading connector, beside one without.

vLLM's copies want a GPU, so the application brings copies of its own. What is kept and found, and
what is counted of it, is vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis import open_session, summarize
from analysis.tables import facts
from tests.support.engine import APP, Application, Lab
from tests.support.scheduler import write_model
from tests.whatif.simulating import Recorded

pytestmark = pytest.mark.engine

BLOCK_TOKENS, CHUNK_TOKENS = 32, 64


@pytest.fixture(scope="module")
def with_and_without(lab: Lab) -> Iterator[tuple[Application, Application]]:
    """Runs that have ended, with 64 MiB of host memory, and without."""
    app, alone = APP.with_name("host_memory.py"), {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with (
        lab.application("host-memory", "--host=64", app=app, **alone) as with_host,
        lab.application("no-host-memory", app=app, **alone) as without,
    ):
        assert (with_host.wait(), without.wait()) == (0, 0), with_host.log
        yield with_host, without


def test_the_session_counts_what_the_connector_counts(
    with_and_without: tuple[Application, Application],
) -> None:
    with_host, without = with_and_without
    counters, session = with_host.result["counters"], open_session(with_host.session)
    found = summarize(session)
    hits = counters["vllm:external_prefix_cache_hits"]
    assert found.prefix_cache.true.external_hit_tokens == hits > 2_000
    assert found.prefix_cache.true.hit_tokens == counters["vllm:prefix_cache_hits"]
    known = facts.read(session)
    block_bytes = known.bytes_per_block
    assert block_bytes is not None
    loaded = counters["vllm:kv_offload_load_bytes"] / block_bytes * BLOCK_TOKENS
    assert found.external is not None
    # What of a chunk the pool still has is not loaded.
    assert found.external.loaded_tokens == hits == loaded
    assert found.external.compute_sec is None or found.external.compute_sec > 0
    assert known.scheduler.offloading is not None
    assert known.scheduler.offloading.chunk_blocks == CHUNK_TOKENS // BLOCK_TOKENS
    assert summarize(open_session(without.session)).external is None


def test_answers_are_those_of_an_engine_without(
    with_and_without: tuple[Application, Application],
) -> None:
    """So what was loaded is what was computed."""
    with_host, without = with_and_without
    assert with_host.result["answers"] == without.result["answers"]


def test_what_if_says_beforehand_what_the_host_will_find(
    with_and_without: tuple[Application, Application], tmp_path: Path
) -> None:
    with_host, without = with_and_without
    source = Recorded(without.session)
    found = source.simulate(
        write_model(tmp_path / "model"), host_gib=64 / 1024, host_chunk=CHUNK_TOKENS
    )
    assert found.host is not None
    real = with_host.result["counters"]["vllm:external_prefix_cache_hits"]
    assert found.host.hit_tokens == pytest.approx(real, rel=0.1)
