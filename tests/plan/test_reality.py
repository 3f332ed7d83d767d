# SPDX-License-Identifier: Apache-2.0
"""A plan beside a session: each difference has parts, and they add up to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from analysis import open_session
from analysis.errors import RuleError, SessionError
from analysis.plan import config, reality, recorded
from analysis.plan.differences import Figure
from analysis.plan.reality import Reality
from tests.analysis.builder import SessionBuilder
from tests.analysis.graphs import GIB, MIB, set_up
from tests.analysis.test_memory import RITUAL
from tests.plan.truth import CONFIGS

MODEL: Mapping[str, Any] = {
    "name": "meta-llama/not-on-this-machine",
    "layers": 32,
    "kv_heads": 8,
    "head_size": 128,
    "dtype": "bfloat16",
}
GROUP: Mapping[str, Any] = {
    "kind": "FullAttentionSpec",
    "block_size": 16,
    "bytes_per_block": 2 * MIB,
}
CACHE: Mapping[str, Any] = {
    "block_size": [16],
    "blocks": 25088,
    "gpu_memory_utilization": 0.9,
    "cache_dtype": "auto",
    "max_model_len": 8192,
    "tokens": 401_408,
    "max_concurrency": 49.0,
}
"""49 GiB in blocks of 2 MiB; 512 of them hold 8,192 tokens."""


def record(session: SessionBuilder, memory: Mapping[str, Any] | None, **changes: Any) -> None:
    """A session with this memory of its one worker, and these changes to metadata.json."""
    workers = None if memory is None else {**memory, "workers": [memory]}
    content = {"model": MODEL, "cache": CACHE, "groups": [GROUP], "memory": workers, **changes}
    set_up(session, **content)


def beside(session: SessionBuilder, **settings: Any) -> Reality:
    """The plan with the session's settings and these, and 16 GiB of weights by default."""
    opened = open_session(session.folder)
    model = config.read(CONFIGS / "llama-3.1-8b.json")
    changes = {"weight_bytes": 16 * GIB, **settings}
    return reality.against(opened, model, replace(recorded.settings_of(opened), **changes))


def figure(found: Reality, name: str) -> Figure:
    one = next(one for one in found.figures if one.name.startswith(name))
    if one.parts:
        gap = (one.measured or 0) - (one.predicted or 0)
        # Blocks are whole and their parts are not.
        assert sum(part.amount for part in one.parts) == pytest.approx(gap, abs=1)
    return one


def amounts(one: Figure) -> dict[str, float]:
    return {part.name: part.amount for part in one.parts}


def test_the_engine_as_planned(session: SessionBuilder) -> None:
    record(session, RITUAL)
    found = beside(session, other_bytes=7 * GIB)
    assert [(one.name, one.difference, one.parts) for one in found.figures] == [
        ("A block of the pool", 0, ()),
        ("Memory asked for", 0, ()),
        ("Weights", 0, ()),
        ("Left for the KV cache", 0, ()),
        ("Blocks", 0, ()),
        ("Tokens in the cache", 0, ()),
        ("Sequences of 8,192 tokens at once", 0, ()),
    ]
    assert found.session == session.folder.name


def test_what_a_plan_leaves_out(session: SessionBuilder) -> None:
    """72 - 16 = 56 GiB were planned, 28,672 blocks. 4, 1 and 2 GiB are lost, 512 blocks a GiB."""
    record(session, RITUAL)
    found = beside(session)
    left = figure(found, "Left")
    assert (left.predicted, left.measured, left.difference) == (56 * GIB, 49 * GIB, -0.125)
    assert amounts(left) == {
        "Activations": -4 * GIB,
        "Not by torch": -GIB,
        "CUDA graphs": -2 * GIB,
    }
    blocks = figure(found, "Blocks")
    assert (blocks.predicted, blocks.measured) == (28_672, 25_088)
    assert amounts(blocks) == {"Activations": -2048, "Not by torch": -512, "CUDA graphs": -1024}
    assert all(part.explained for part in blocks.parts)
    assert amounts(figure(found, "Tokens")) == {"Blocks": -3584 * 16}
    assert amounts(figure(found, "Sequences")) == {"Blocks": -7}


def test_weights_that_are_larger(session: SessionBuilder) -> None:
    """12 GiB were planned and 16 loaded: 2,048 blocks less."""
    record(session, RITUAL)
    found = beside(session, weight_bytes=12 * GIB)
    weights = figure(found, "Weights")
    assert weights.difference == pytest.approx(1 / 3)
    assert [part.explained for part in weights.parts] == [False]
    assert amounts(figure(found, "Blocks"))["Weights"] == -2048


def test_another_share_of_the_gpu(session: SessionBuilder) -> None:
    """0.8 of 80 GiB were planned and the engine asked for 72 GiB: 8 GiB, 4,096 blocks, more."""
    record(session, RITUAL)
    found = beside(session, gpu_memory_utilization=0.8, other_bytes=7 * GIB)
    assert amounts(figure(found, "Memory asked for")) == {"Not explained": pytest.approx(8 * GIB)}
    assert amounts(figure(found, "Blocks"))["Memory asked for"] == pytest.approx(4096)


def test_an_override(session: SessionBuilder) -> None:
    """49 GiB make 25,088 blocks, and the engine made 1,000."""
    record(
        session, RITUAL, cache={**CACHE, "blocks": 1000, "tokens": 16_000, "max_concurrency": 2.0}
    )
    blocks = figure(beside(session), "Blocks")
    assert amounts(blocks)["The number of blocks"] == 1000 - 25_088
    made = "1,000 blocks were made where 25,088 fit"
    assert blocks.parts[-1].note == f"{made}: num_gpu_blocks_override does that"
    asked = {**CACHE, "blocks": 1000, "num_gpu_blocks_override": 1000}
    record(session, RITUAL, cache=asked)
    note = figure(beside(session), "Blocks").parts[-1].note
    assert note == f"{made}: --num-gpu-blocks-override 1000 does that"


def test_a_given_kv_cache_memory(session: SessionBuilder) -> None:
    """With kv_cache_memory_bytes vLLM measures nothing: 10 GiB are 5,120 blocks, not 28,672."""
    unknown = {"activation_bytes": None, "non_torch_bytes": None, "kv_bytes": None}
    record(session, {**RITUAL, **unknown}, cache={**CACHE, "blocks": 5120})
    blocks = figure(beside(session), "Blocks")
    assert amounts(blocks) == {"The KV cache's memory": 5120 - 28_672}


def test_larger_blocks(session: SessionBuilder) -> None:
    """The plan does not know the layers of a drafting model, for example."""
    group = {**GROUP, "bytes_per_block": 4 * MIB}
    record(session, RITUAL, groups=[group], cache={**CACHE, "blocks": 12_544})
    found = beside(session, other_bytes=7 * GIB)
    assert figure(found, "A block").difference == 1
    assert amounts(figure(found, "Blocks"))["A block's size"] == -12_544


def test_what_does_not_add_up_is_named(session: SessionBuilder) -> None:
    """vLLM left 45 GiB, and its own figures leave 49."""
    record(session, {**RITUAL, "kv_bytes": 45 * GIB}, cache={**CACHE, "blocks": 23_040})
    blocks = figure(beside(session), "Blocks")
    assert amounts(blocks)["Does not add up"] == -2048
    assert [part.name for part in blocks.parts if not part.explained] == ["Does not add up"]


def test_what_nothing_accounts_for_is_named(session: SessionBuilder) -> None:
    """The session lacks the activations, so nothing explains the 4 GiB that they took."""
    record(session, {**RITUAL, "activation_bytes": None})
    left = figure(beside(session), "Left")
    assert amounts(left)["Not explained"] == -4 * GIB
    assert [part.explained for part in left.parts] == [True, True, False]


def test_a_release_with_another_formula(session: SessionBuilder) -> None:
    """Two groups. The release counts blocks x 16 / 2 tokens, and the plan what a sequence holds:
    256 blocks of all tokens, and 12 + 1 of a window of 128 with 64 in flight."""
    window = {"kind": "SlidingWindowSpec", "block_size": 16, "bytes_per_block": 12 * 32_768}
    groups = [{**window, "kind": "FullAttentionSpec"}, window]
    cache = {**CACHE, "blocks": 1000, "max_model_len": 4096, "tokens": 8000, "max_concurrency": 2}
    scheduler = {"async_scheduling": False}
    record(session, None, groups=groups, cache=cache, scheduler=scheduler)
    opened = open_session(session.folder)
    model = config.read(CONFIGS / "gpt-oss-20b.json")
    found = reality.against(opened, model, recorded.settings_of(opened))
    tokens = figure(found, "Tokens")
    assert tokens.predicted == int(1000 / (256 + 13) * 4096)
    assert amounts(tokens) == {"Another formula": 8000 - (tokens.predicted or 0)}


def test_a_session_without_a_gpu(session: SessionBuilder) -> None:
    record(session, None)
    found = beside(session)
    assert [one.name for one in found.figures] == [
        "A block of the pool",
        "Tokens in the cache",
        "Sequences of 8,192 tokens at once",
    ]
    assert all(one.difference == 0 for one in found.figures)
    (note,) = found.notes
    assert note.startswith("The session records no memory of a GPU.")


def test_the_session_alone_is_enough(session: SessionBuilder) -> None:
    """The model is not on this machine: the plan has the layers and weights of the session."""
    record(session, RITUAL, parallel={"tensor": 2, "pipeline": 1})
    opened = open_session(session.folder)
    model, folder = recorded.model_of(opened)
    assert folder is None
    # The session has the heads on one GPU, and there are two GPUs.
    assert model.cached[0].kv_heads == 16  # type: ignore[union-attr]
    found = reality.against(opened, model, recorded.settings_of(opened))
    assert "Weights" not in {one.name for one in found.figures}
    assert figure(found, "Blocks").predicted == 28_672
    assert "The weights are the session's own" in found.notes[0]


def test_a_session_that_records_too_little(session: SessionBuilder) -> None:
    record(session, RITUAL, groups=None, cache=None)
    with pytest.raises(SessionError, match="does not describe the KV cache's groups"):
        recorded.settings_of(open_session(session.folder))
    record(session, RITUAL, model={"name": "gone"})
    with pytest.raises(SessionError, match="name the model's folder"):
        recorded.model_of(open_session(session.folder))
    record(session, RITUAL, groups=[{**GROUP, "kind": "MambaSpec"}])
    with pytest.raises(RuleError, match="keeps MambaSpec, which the session alone"):
        recorded.model_of(open_session(session.folder))
