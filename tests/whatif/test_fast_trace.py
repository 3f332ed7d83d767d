# SPDX-License-Identifier: Apache-2.0
"""The fast engine on a real trace: against vLLM's own scheduler, and against other simulators.

The other simulators are no part of the suite; what they found is written down here.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from analysis.whatif import belady, fast, fifo, lru, policies, references
from analysis.whatif.ids import Ids
from analysis.whatif.references import References
from analysis.whatif.workload import Workload, read_workload
from tests.support.scheduler import TRACE
from tests.whatif import truth

BLOCKS = (250, 1_000, 2_000, 4_000, 8_000, 16_000)

KVCACHE_SIMULATOR = {
    "fifo": (700_928, 808_960, 985_324, 1_516_270, 3_181_052, 4_881_414),
    "lru": (768_000, 835_072, 1_044_716, 1_603_034, 3_636_230, 5_470_214),
    "optimal": (1_932_762, 3_766_756, 5_142_534, 6_695_810, 7_300_877, 7_300_877),
}
"""Hit tokens of the trace's second half in pools of ``BLOCKS``, found by kvcache-simulator 0.1.3
(PyPI): its ``simulate_policy(build_execution_plan(parse_trace_file(TRACE, block_size=512)), policy,
blocks)``. It counts the last block of a prompt, too, full or not, and no output."""

CEILING = 7_300_877
"""And by its ``simulate_ceiling``."""

SIZES = (100, 500, 2_000, 5_000)

LIBCACHESIM = {
    "lru": (767, 799, 938, 2_275),
    "fifo": (650, 761, 928, 2_255),
    "lfu": (799, 799, 1_050, 2_089),
    "arc": (799, 799, 1_050, 2_114),
    "s3-fifo": (827, 903, 1_602, 2_766),
    "sieve": (799, 799, 1_050, 2_089),
}
"""Hits in caches of ``SIZES`` objects, found by libcachesim 0.3.5 (PyPI), one ``get`` after the
other: the full blocks of the trace's first 800 requests, each as a cache of objects sees it,
without prefixes; the last block of a request first, but for FIFO."""

VLLM = {
    1_000: (3_255, 75_245),
    2_000: (3_888, 73_612),
    4_000: (7_049, 68_451),
    16_000: (20_652, 42_848),
}
"""Blocks of 16 tokens that vLLM 0.32's scheduler reused and evicted, by the size of its pool, whose
null block is one of them: the figures of tests/kv/test_trace.py."""

POINTS = 0.02

LIMIT = 500
"""Requests that the scheduler is really driven with."""


@pytest.fixture(scope="module")
def trace() -> Workload:
    return read_workload(TRACE)


@pytest.fixture(scope="module")
def whole(trace: Workload) -> References:
    """As kvcache-simulator has it: prompts alone, every block of them can be found."""
    lengths = trace.prompt_ids.lengths
    return references.of_chains(
        trace.prompt_ids,
        readable=lengths,
        needs=lengths,
        freed=np.arange(len(trace)),
        counts=np.arange(len(trace)) >= len(trace) // 2,
        block_size=512,
        input_tokens=trace.input_tokens,
    )


def test_equal_to_kvcache_simulator(whole: References) -> None:
    def tokens(found: np.ndarray) -> int:
        within = np.minimum(found * 512, whole.input_tokens)
        return int(within[whole.counts].sum())

    distances = lru.distances(whole)
    assert {
        "fifo": tuple(map(tokens, fifo.found(whole, BLOCKS))),
        "lru": tuple(tokens(distances.found(size)) for size in BLOCKS),
        "optimal": tuple(map(tokens, belady.found(whole, BLOCKS))),
    } == KVCACHE_SIMULATOR
    assert tokens(distances.found(distances.enough())) == CEILING
    assert tokens(distances.found(distances.enough() - 1)) < CEILING


def test_equal_to_libcachesim(trace: Workload) -> None:
    """Every block is a request of its own, so that prefixes play no part."""
    full = trace.prompt_ids.head(trace.input_tokens // 512)
    forward = [block for chain in list(full)[:800] for block in chain.tolist()]
    backward = [block for chain in list(full)[:800] for block in chain.tolist()[::-1]]
    rules: dict[str, type[policies.Cache]] = {
        "lfu": policies.Lfu,
        "arc": policies.Arc,
        "s3-fifo": policies.S3Fifo,
        "sieve": policies.Sieve,
    }
    found = {
        name: tuple(hits(rule, backward, size) for size in SIZES) for name, rule in rules.items()
    }
    distances = lru.distances(singly(backward))
    found["lru"] = tuple(int(distances.found(size).sum()) for size in SIZES)
    found["fifo"] = tuple(int(each.sum()) for each in fifo.found(singly(forward), SIZES))
    assert found == LIBCACHESIM


def hits(rule: type[policies.Cache], blocks: list[int], size: int) -> int:
    cache, count = rule(size), 0
    for block in blocks:
        count += block in cache
        cache.use(block)
    return count


def singly(blocks: list[int]) -> References:
    ones = np.ones(len(blocks), np.int64)
    return references.of_chains(
        Ids(np.array(blocks), np.arange(len(blocks) + 1)),
        readable=ones,
        needs=ones,
        freed=np.arange(len(blocks)),
        counts=ones > 0,
        block_size=1,
        input_tokens=ones,
    )


def shrunk(folder: Path) -> Path:
    """The trace with blocks of 16 tokens in place of 512, as the scheduler was given it."""
    path = folder / "trace.jsonl"
    with gzip.open(TRACE, "rt") as lines, open(path, "w") as file:
        for line in lines:
            row = json.loads(line)
            for length in ("input_length", "output_length"):
                row[length] = max(1, row[length] // 32)
            row["hash_ids"] = row["hash_ids"][: -(-row["input_length"] // 16)]
            file.write(json.dumps({**row, "block_size": 16}) + "\n")
    return path


def test_as_vllm_at_every_size(tmp_path: Path) -> None:
    found = fast.curve(read_workload(shrunk(tmp_path)), [blocks - 1 for blocks in VLLM], ["lru"])
    for point, (reused, evicted) in zip(found.points, VLLM.values(), strict=True):
        (outcome,) = point.outcomes
        assert outcome.query_tokens == 1_265_773
        assert outcome.hit_rate == pytest.approx(16 * reused / 1_265_773, abs=POINTS)
        assert outcome.evictions == pytest.approx(evicted, rel=0.01)


def test_as_vllm_at_another_block_size(model: Path, hooks_on: None, tmp_path: Path) -> None:
    """Recorded in 2,000 blocks of 16 tokens; really run in 700 blocks of 32, too."""
    recorded = truth.run(model, tmp_path / "recorded", 2_000, limit=LIMIT)
    real = truth.run(model, tmp_path / "real", 700, limit=LIMIT, block_size=32)
    workload = read_workload(recorded.session)
    found = fast.curve(workload.resized(32), [699], ["lru"])
    (outcome,) = found.points[0].outcomes
    assert outcome.query_tokens == real.query_tokens
    assert outcome.hit_rate == pytest.approx(real.hit_rate, abs=POINTS)
    assert outcome.evictions == pytest.approx(real.evictions, rel=0.01)
    # And at the size that it was recorded at, where the session says how it really was.
    own = fast.curve(workload, policies=["lru"])
    assert own.at_measured is not None
    assert own.measured is not None
    (outcome,) = own.at_measured.outcomes
    assert (own.measured.hit_tokens, own.measured.evictions) == (
        recorded.hit_tokens,
        recorded.evictions,
    )
    assert outcome.hit_rate == pytest.approx(recorded.hit_rate, abs=POINTS)
