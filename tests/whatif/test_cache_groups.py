# SPDX-License-Identifier: Apache-2.0
"""Sessions with several KV cache groups, or one that is none of full attention, against what
vLLM's scheduler really did with them, counted by the oracle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.errors import RuleError, SessionError
from analysis.tables.facts import Group
from analysis.whatif.configuration import intervals
from analysis.whatif.groups import least_blocks, most_blocks
from tests.support.scheduler import RequestMaker, tokens
from tests.whatif import truth
from tests.whatif.hybrids import (
    Specs,
    alone,
    checkpoints,
    chunks,
    mixed,
    scheduling,
    shared,
    states,
    window,
    windows,
)
from tests.whatif.simulating import Recorded
from tests.whatif.test_exact import LIMITS, counts
from tests.whatif.truth import Truth

pytestmark = pytest.mark.usefixtures("hooks_on")


def ran(
    model: Path, folder: Path, blocks: int, specs: Specs, *, size: int = 16, **more: Any
) -> Truth:
    arguments = {**scheduling(specs, size), **more}
    requests = shared(arguments["hash_block_size"])
    return truth.run(model, folder, blocks, requests=requests, step_sec=truth.device, **arguments)


CASES = [
    pytest.param(window, 320, {}, id="window"),
    pytest.param(window, 320, {"retention_interval": 0}, id="window, sparse"),
    pytest.param(windows, 500, {"retention_interval": 256}, id="windows, intervals"),
    pytest.param(chunks, 320, {}, id="chunks"),
    pytest.param(states, 120, {}, id="states"),
    pytest.param(states, 120, {"retention_interval": 0}, id="states, sparse"),
    pytest.param(checkpoints, 120, {"retention_interval": 0}, id="states at prompts' ends"),
    pytest.param(mixed, 260, {"retention_interval": 0}, id="blocks of two sizes"),
    pytest.param(alone, 120, {}, id="windows alone"),
]


@pytest.mark.parametrize(("specs", "blocks", "more"), CASES)
def test_as_recorded_it_does_the_same(
    model: Path, tmp_path: Path, specs: Specs, blocks: int, more: dict[str, Any]
) -> None:
    true = ran(model, tmp_path / "s", blocks, specs, **more)
    found = Recorded(true.session).simulate(model)
    assert counts(found) == counts(true)
    # Otherwise it would show nothing.
    assert min(true.evictions, true.hit_tokens) > 0


@pytest.mark.parametrize(("specs", "blocks", "more"), CASES)
def test_elsewhere_it_does_what_vllm_would(
    model: Path, tmp_path: Path, specs: Specs, blocks: int, more: dict[str, Any]
) -> None:
    larger = blocks * 5 // 2
    source = ran(model, tmp_path / "source", blocks, specs, **more)
    true = ran(model, tmp_path / "true", larger, specs, **more)
    found = Recorded(source.session).simulate(model, larger)
    assert abs((found.hit_rate or 0) - true.hit_rate) <= 0.002
    assert abs((found.evictions or 0) - true.evictions) <= 0.01 * true.evictions
    assert true.hit_rate > source.hit_rate + 0.002


@pytest.mark.parametrize(
    ("specs", "blocks", "settings", "really"),
    [
        pytest.param(window, 640, {"retention_interval": 0}, None, id="sparse"),
        pytest.param(window, 640, {"retention_interval": 320}, None, id="intervals"),
        pytest.param(states, 300, {"retention_interval": 0}, None, id="sparse states"),
        pytest.param(window, 320, {"block_size": 32}, {"size": 32}, id="larger blocks"),
    ],
)
def test_other_settings(
    model: Path,
    tmp_path: Path,
    specs: Specs,
    blocks: int,
    settings: dict[str, int],
    really: dict[str, int] | None,
) -> None:
    source = ran(model, tmp_path / "source", 640 if specs is window else 300, specs)
    more: dict[str, Any] = {**(really or settings)}
    true = ran(model, tmp_path / "true", blocks, specs, **more)
    found = Recorded(source.session).simulate(model, blocks, **settings)
    assert abs((found.hit_rate or 0) - true.hit_rate) <= 0.002
    assert abs((found.evictions or 0) - true.evictions) <= 0.01 * true.evictions
    assert abs(true.evictions - source.evictions) > 0.02 * source.evictions


def test_what_a_window_lets_go_of_makes_room(model: Path, tmp_path: Path) -> None:
    """A window alone holds as many blocks as it is long, however long the request is. Beside full
    attention every token keeps a block, and a request that needs too many is left out."""
    prompts = [(0.0, RequestMaker(16)(f"{n}", tokens(n, 1_000), 20)) for n in range(3)]
    limits: dict[str, Any] = {**LIMITS, "max_num_batched_tokens": 64}
    source = {
        each: Recorded(
            truth.run(
                model,
                tmp_path / each.__name__,
                300,
                requests=[(at, copied(request)) for at, request in prompts],
                specs=each(16),
                **limits,
            ).session
        )
        for each in (alone, window)
    }
    few = source[alone].simulate(model, 30)
    assert (few.requests, few.failed_requests) == (3, 0)
    assert source[window].simulate(model, 30).failed_requests == 3
    # It holds 64 blocks of full attention, and at most 12 more at once.
    assert source[window].simulate(model, 60).failed_requests == 3
    assert source[window].simulate(model, 90).failed_requests == 0


def test_a_request_that_preempts_itself_is_given_up(model: Path, tmp_path: Path) -> None:
    """The blocks of full attention fit into the pool, and those of the window beside them do not:
    so vLLM would preempt it for ever."""
    requests = [(0.0, RequestMaker(16)("one", tokens(1, 300), 300))]
    settings: dict[str, Any] = {**LIMITS, "max_num_batched_tokens": 64}
    settings |= {"scheduler_reserve_full_isl": False, "watermark": 0.0}
    settings |= {"enable_prefix_caching": False}
    true = truth.run(model, tmp_path / "s", 100, requests=requests, specs=window(16), **settings)
    found = Recorded(true.session).simulate(model, 41)
    assert (found.requests, found.failed_requests) == (0, 1)
    assert (found.preemptions or 0) > 1


def copied(request: Any) -> Any:
    return RequestMaker(16)(request.request_id, request.prompt_token_ids, request.max_tokens)


@pytest.fixture(scope="module")
def recorded_window(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(model, tmp_path_factory.mktemp("window") / "s", 640, window).session


def changed(session: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The session with another metadata.json."""
    copy = folder / "session"
    shutil.copytree(session, copy)
    known = json.loads((copy / "metadata.json").read_text())
    change(known)
    (copy / "metadata.json").write_text(json.dumps(known))
    return copy


def without_window(known: dict[str, Any]) -> None:
    del known["groups"][1]["sliding_window"]


def of_another_kind(known: dict[str, Any]) -> None:
    known["groups"][1] |= {"kind": "RSWASpec", "layer_kind": "RSWASpec"}


def replayed(known: dict[str, Any]) -> None:
    known["groups"][1]["prefix_cacheable"] = False


def in_two_pools(known: dict[str, Any]) -> None:
    known["groups"][1]["pool"] = 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_window, "group 1 has no sliding_window in metadata.json"),
        (of_another_kind, "group 1 is RSWASpec, which is not simulated"),
        (replayed, "group 1 is SlidingWindowSpec, which is not simulated"),
        (in_two_pools, "have several block pools"),
    ],
)
def test_what_is_not_taken_is_refused(
    recorded_window: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    with pytest.raises(SessionError, match=said):
        Recorded(changed(recorded_window, tmp_path, change))


def test_layers_of_several_sizes_are_as_one_of_them(
    recorded_window: Path, tmp_path: Path, model: Path
) -> None:
    def uniform(known: dict[str, Any]) -> None:
        known["groups"][0]["kind"] = "UniformTypeKVCacheSpecs"

    same = Recorded(changed(recorded_window, tmp_path, uniform)).simulate(model)
    assert same == Recorded(recorded_window).simulate(model)


def test_a_session_that_does_not_say_what_it_kept(recorded_window: Path, tmp_path: Path) -> None:
    def forget(known: dict[str, Any]) -> None:
        del known["cache"]["prefix_cache_retention_interval"]

    notes = Recorded(changed(recorded_window, tmp_path, forget)).notes
    assert any("prefix_cache_retention_interval is not recorded" in note for note in notes)
    assert not any("retention" in note for note in Recorded(recorded_window).notes)


def test_blocks_of_states_have_no_size_of_their_own(model: Path, tmp_path: Path) -> None:
    source = Recorded(ran(model, tmp_path / "s", 300, states).session)
    with pytest.raises(RuleError, match="--block-size 32: the model's 3 KV cache groups have"):
        source.configuration(300, block_size=32)


def test_an_interval_needs_a_group_that_it_says_something_of(model: Path, tmp_path: Path) -> None:
    requests = [(0.0, RequestMaker(16)("one", tokens(1, 100), 3))]
    source = Recorded(truth.run(model, tmp_path / "s", 50, requests=requests, **LIMITS).session)
    with pytest.raises(RuleError, match="--prefix-cache-retention-interval"):
        source.configuration(50, retention_interval=0)


def test_intervals() -> None:
    assert intervals("0, 1024,dense") == (0, 1024, None)
    with pytest.raises(RuleError, match="'-1' is no number from 0"):
        intervals("-1")


def test_how_many_blocks_a_request_holds() -> None:
    """Between what full attention needs, and what all groups would if they kept everything."""
    groups = (
        Group("FullAttentionSpec", 32),
        Group("SlidingWindowSpec", 16, sliding_window=100),
        Group("FullAttentionSpec", 16),
    )
    lengths = np.array([1, 100])
    assert [least_blocks(groups, 32, each) for each in lengths] == [2, 4 + 7]
    assert most_blocks(groups, 32, lengths).tolist() == [3, 4 + 7 + 7]
    assert least_blocks((), 32, 100) == most_blocks((), 32, lengths)[1] == 4
