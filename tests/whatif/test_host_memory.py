# SPDX-License-Identifier: Apache-2.0
"""A second tier in host memory, against vLLM's scheduler with its offloading connector."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.errors import RuleError
from analysis.tables import facts
from analysis.tables.facts import Offloading
from analysis.tables.session import open_session
from analysis.whatif import host_memory
from analysis.whatif.clock import StepTime
from analysis.whatif.configuration import Choices, configurations, pools, recorded
from analysis.whatif.host_memory import HostMemory, HostOutcome
from analysis.whatif.outcome import Outcome
from analysis.whatif.workload import read_workload
from profilemate.simulation.engine import Engine
from tests.analysis.invoke import invoke
from tests.whatif import truth
from tests.whatif.hybrids import shared, window
from tests.whatif.offloading import ClockedWorker, connector
from tests.whatif.simulating import Recorded
from tests.whatif.test_drops import FOUND, at_work, in_rounds
from tests.whatif.test_exact import LIMITS
from tests.whatif.truth import Truth

pytestmark = pytest.mark.usefixtures("hooks_on")

BLOCK_BYTES = 1_024
"""Of the stand-in model."""

BLOCK_SEC = 1e-4
BANDWIDTH = BLOCK_BYTES / BLOCK_SEC

SMALL, LARGE = 200, 800


def ran(
    model: Path, folder: Path, blocks: int, *, chunks: int = 1_200, per: int = 1, **more: Any
) -> tuple[Truth, ClockedWorker]:
    extra = more.pop("extra", {})
    worker = ClockedWorker(BLOCK_SEC)
    found = truth.run(
        model,
        folder,
        blocks,
        requests=shared(),
        step_sec=truth.device,
        worker=worker,
        kv_transfer_config=connector(chunks, BLOCK_BYTES, per, **extra),
        **LIMITS,
        **more,
    )
    return found, worker


def host_of(outcome: Outcome) -> HostOutcome:
    assert outcome.host is not None
    return outcome.host


def ready(session: Path) -> Recorded:
    """The session, with the bandwidth of the worker that it ran with."""
    found = Recorded(session)
    assert found.base.host is not None
    found.base = replace(found.base, host=replace(found.base.host, bytes_per_sec=BANDWIDTH))
    return found


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="blocks"),
        pytest.param({"per": 4, "chunks": 300}, id="chunks"),
        pytest.param({"chunks": 400, "extra": {"offload_prompt_only": False}}, id="answers, too"),
        pytest.param({"chunks": 400, "extra": {"eviction_policy": "arc"}}, id="arc"),
        pytest.param({"async_scheduling": True, "batches": 2}, id="asynchronous"),
        pytest.param({"specs": window, "retention_interval": 0}, id="windows"),
    ],
)
def test_it_does_what_vllm_does(model: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    if "specs" in how:
        how = {**how, "specs": how["specs"](16)}
    sizes = {blocks: {} for blocks in (SMALL, LARGE)}
    if "specs" in how:
        # All groups' blocks lie in one pool.
        sizes = {blocks: {"pool_bytes": BLOCK_BYTES * blocks} for blocks in sizes}
    runs = {
        blocks: ran(model, tmp_path / str(blocks), blocks, **how, **more)
        for blocks, more in sizes.items()
    }
    source = ready(runs[SMALL][0].session)
    for blocks, (true, worker) in runs.items():
        found = source.simulate(model, blocks)
        host = host_of(found)
        assert abs((found.hit_rate or 0) - true.hit_rate) <= 0.002
        assert abs((host.hit_rate or 0) - true.host_tokens / true.query_tokens) <= 0.002
        assert abs((found.evictions or 0) - true.evictions) <= 0.01 * true.evictions
        assert abs((found.steps or 0) - true.steps) <= 0.02 * true.steps
        for moved, way in ((host.loaded_bytes, worker.load), (host.stored_bytes, worker.store)):
            assert moved is not None
            assert abs(moved / BLOCK_BYTES - way.blocks) <= 0.01 * way.blocks + 16
    assert runs[SMALL][0].host_tokens > 5_000
    assert runs[SMALL][1].store.blocks > 1_000


def test_external_hits_are_those_that_the_connector_counts(model: Path, tmp_path: Path) -> None:
    """Also of prompts that are loaded to their end, of which vLLM computes the last token again,
    and of those that end a token later."""
    true, _ = ran(model, tmp_path / "s", SMALL)
    found = host_of(Recorded(true.session).measured)
    assert found.hit_tokens == true.host_tokens
    lengths = read_workload(true.session)
    loaded = lengths.external_tokens > 0
    whole = lengths.hit_tokens + lengths.external_tokens == lengths.input_tokens
    assert (loaded & whole).any()
    assert (
        loaded & (lengths.hit_tokens + lengths.external_tokens == lengths.input_tokens - 1)
    ).any()


def test_the_session_says_how_blocks_were_kept(model: Path, tmp_path: Path) -> None:
    true, _ = ran(model, tmp_path / "s", SMALL, chunks=300, per=4)
    known = facts.read(open_session(true.session))
    assert known.scheduler.connector == "OffloadingConnector"
    assert known.scheduler.offloading == Offloading(
        spec="CPUOffloadingSpec",
        host_bytes=300 * 4_096,
        chunk_blocks=4,
        prompts_only=True,
        policy="lru",
        store_threshold=0,
    )
    assert host_memory.of_session(known, BLOCK_BYTES) == HostMemory(
        total_bytes=300 * 4_096, block_bytes=BLOCK_BYTES, chunk_blocks=4
    )


TOKEN_BYTES = 64 << 10


def trace(path: Path, prompts: list[tuple[float, list[int]]]) -> Path:
    """A trace of prompts of whole blocks of 16 tokens, by their ids."""
    rows = [
        {
            "timestamp": at,
            "input_length": 16 * len(ids),
            "output_length": 1,
            "hash_ids": ids,
            "block_size": 16,
        }
        for at, ids in prompts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_by_hand(model: Path, tmp_path: Path) -> None:
    """Ten blocks are computed and stored, pushed out of a pool of ten by ten others, and loaded in
    place of being computed. A block of 1 MiB takes 1 ms in each direction.

    The first step takes 1 ms + 160 tokens of 0.1 ms. Its blocks are copied with the step after it,
    which computes nothing. The second request takes the blocks of the first: by then, 20 s later,
    the copies are done. The third waits for ten blocks, 10 ms, and computes its last token anew.
    """
    first, other = list(range(10)), list(range(10, 20))
    path = trace(tmp_path / "t.jsonl", [(0, first), (20_000, other), (40_000, first)])
    workload = read_workload(path)
    chosen = Choices(blocks=pools("11"), token_bytes=TOKEN_BYTES, host_gib=(0.0, 1.0))
    base, _ = recorded(workload, chosen)
    without, with_host = configurations(base, chosen, has_contents=True, is_recorded=False)
    assert (without.host, with_host.label) == (None, "11 blocks, 1 GiB host")
    memory = with_host.host
    assert memory is not None
    assert (memory.block_bytes, memory.chunks) == (1 << 20, 1_024)
    with_host = replace(with_host, host=replace(memory, bytes_per_sec=(1 << 20) * 1_000))
    step_time = StepTime(1e-3, prefill_token_sec=1e-4, steps=9, mean_sec=1.0, rms_error_sec=0.2)

    def run(configuration: Any) -> Outcome:
        engine = Engine(model, configuration, workload, step_time)
        return engine.run().outcome(configuration, (), step_time)

    plain, found = run(without), run(with_host)
    host = host_of(found)
    assert (plain.hit_tokens, plain.host) == (0, None)
    assert (found.hit_tokens, host.hit_tokens, found.query_tokens) == (0, 160, 480)
    assert (host.loaded_tokens, host.loaded_bytes) == (160, 10 << 20)
    assert host.stored_bytes == 20 << 20
    assert host.load_sec == pytest.approx(0.010)
    assert host.compute_sec == pytest.approx(0.016)
    assert host.saved_sec == pytest.approx(0.006)
    assert host.confidence == "medium"
    assert found.queue_mean_sec == pytest.approx(0.010 / 3)
    # The last answer: 10 ms of copying, 1 ms and a token.
    assert found.span_sec == pytest.approx(40 + 0.010 + 0.001 + 0.0001)


def test_copies_wait_for_the_step_and_for_each_other(model: Path, tmp_path: Path) -> None:
    """After 40 s a new prompt of five blocks comes with two that are in host memory alone. They are
    loaded from the end of its step on, one after the other: 9 ms, 10 ms and 10 ms. Then the last
    token of the second takes 1.1 ms. So would copies that begin with the step end 9 ms earlier, and
    two at once 10 ms."""
    first, second, other = list(range(10)), list(range(10, 20)), list(range(20, 50))
    late = [(40_000, list(range(50, 55))), (40_000, first), (40_000, second)]
    prompts = [(0, first), (10_000, second), (20_000, other), *late]
    workload = read_workload(trace(tmp_path / "t.jsonl", prompts))
    chosen = Choices(blocks=pools("31"), token_bytes=TOKEN_BYTES, host_gib=(1.0,))
    base, _ = recorded(workload, chosen)
    (one,) = configurations(base, chosen, has_contents=True, is_recorded=False)
    assert one.host is not None
    one = replace(one, host=replace(one.host, bytes_per_sec=(1 << 20) * 1_000))
    found = Engine(model, one, workload, StepTime(1e-3, prefill_token_sec=1e-4)).run().outcome(one)
    assert host_of(found).hit_tokens == 320
    assert found.span_sec == pytest.approx(40 + 0.009 + 0.010 + 0.010 + 0.0011)


def test_a_step_waits_for_blocks_that_are_taken_before_they_were_copied(
    model: Path, tmp_path: Path
) -> None:
    """The second request comes at once. Its step takes the blocks of the first, whose ten copies of
    1 s each must be done before."""
    path = trace(tmp_path / "t.jsonl", [(0, list(range(10))), (1, list(range(10, 20)))])
    workload = read_workload(path)
    chosen = Choices(blocks=pools("12"), token_bytes=TOKEN_BYTES, host_gib=(1.0,))
    base, _ = recorded(workload, chosen)
    (one,) = configurations(base, chosen, has_contents=True, is_recorded=False)
    assert one.host is not None
    one = replace(one, max_num_seqs=1, host=replace(one.host, bytes_per_sec=1 << 20))
    found = Engine(model, one, workload, StepTime(0.5)).run().outcome(one)
    assert found.span_sec == pytest.approx(0.5 + 10 + 0.5)
    # A constant step says nothing of what a token takes.
    host = host_of(found)
    assert (host.compute_sec, host.saved_sec, host.confidence) == (None, None, None)


def test_resets_empty_the_pool_alone(model: Path, tmp_path: Path) -> None:
    """Four rounds of the same prompts, with a reset between two: the pool finds nothing again, and
    the host finds all."""
    source = Recorded(in_rounds(model, tmp_path / "s").session)
    found = source.simulate(model, host_gib=1.0)
    assert (found.hit_tokens, host_of(found).hit_tokens) == (0, FOUND)


def test_resets_that_preempt_requests(model: Path, tmp_path: Path) -> None:
    """They preempt requests, of which vLLM's connector then finds the blocks: there it fails. What
    is simulated says so."""
    true = truth.run(
        model,
        tmp_path / "s",
        SMALL,
        requests=shared(),
        step_sec=truth.device,
        abort=at_work(7),
        **LIMITS,
    )
    with pytest.raises(RuntimeError, match="a reset preempts requests"):
        Recorded(true.session).simulate(model, host_gib=1.0, host_bandwidth=0.001)


def test_without_prefix_caching_nothing_is_found(model: Path, tmp_path: Path) -> None:
    true = truth.run(
        model, tmp_path / "s", SMALL, requests=shared(), step_sec=truth.device, **LIMITS
    )
    source = Recorded(true.session)
    found = source.simulate(model, host_gib=1.0, prefix_caching=False)
    assert found.query_tokens == 0
    assert found.requests == len(shared())


def test_confidence() -> None:
    def known(error: float) -> str | None:
        return host_memory.confidence(
            StepTime(1.0, steps=9, mean_sec=2.0, rms_error_sec=2.0 * error)
        )

    assert [known(error) for error in (0.1, 0.3, 0.31)] == ["high", "medium", "low"]
    assert host_memory.confidence(StepTime(1.0)) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_bytes": None}, "--kv-bytes-per-token"),
        ({"chunk_tokens": 24}, "multiple"),
        ({"gib": 1e-6}, "no room for one chunk"),
        ({"gib": 1e6}, "at most"),
    ],
)
def test_impossible_memories_are_refused(changes: dict[str, Any], said: str) -> None:
    given = {"gib": 1.0, "chunk_tokens": None, "bandwidth": None, "block_bytes": 1_024, "gpus": 1}
    with pytest.raises(RuleError, match=said):
        host_memory.changed(None, **{**given, **changes}, block_size=16)


def test_the_command(model: Path, tmp_path: Path) -> None:
    true, _ = ran(model, tmp_path / "s", SMALL, chunks=600)
    said = invoke("whatif", true.session, "--host-gib=0,0.001", "--json", "--jobs=1")
    found = json.loads(said.stdout)
    assert [one["label"] for one in found["outcomes"]] == ["no host memory", "0.001 GiB host"]
    without, small = found["outcomes"]
    assert without["host"] is None
    assert found["measured"]["host"]["hit_tokens"] == true.host_tokens
    assert found["baseline"]["host"]["gib"] == pytest.approx(600 * 4_096 / 2**30)
    assert 0 < small["host"]["hit_tokens"] < found["baseline"]["host"]["hit_tokens"]
    assert small["host"]["saved_sec"] == pytest.approx(
        small["host"]["compute_sec"] - small["host"]["load_sec"]
    )
    shown = invoke("whatif", true.session, "--host-gib=0.001", "--host-chunk=64", "--jobs=1").stdout
    assert "Host memory" in shown
    tables = shown[shown.index("Host memory") : shown.index("Scheduling")]
    assert max(map(len, tables.splitlines())) <= 80
    assert "0.001 GiB host, chunks of" in shown
    assert "confidence, by the fit of the step times" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host-chunk=64"], "--host-chunk: there is no host memory"),
        (["--host-gib=8"], "--kv-bytes-per-token"),
        (["--host-gib=lots"], "--host-gib: 'lots' is no number of GiB"),
        (["--host-gib=8", "--host-bandwidth=0"], "--host-bandwidth: '0' is no number of GB/s"),
        (["--host-gib=8", "--kv-bytes-per-token=1,2"], "--kv-bytes-per-token: give one number"),
    ],
)
def test_a_wrong_option_is_one_line(tmp_path: Path, options: list[str], said: str) -> None:
    path = trace(tmp_path / "t.jsonl", [(0, [1, 2])])
    answer = invoke("whatif", path, "--blocks=12", *options)
    assert answer.returncode == 2
    assert said in " ".join((answer.stdout + answer.stderr).split())
