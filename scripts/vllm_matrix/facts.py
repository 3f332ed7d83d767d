# SPDX-License-Identifier: Apache-2.0
"""What does this release do where releases differ, and profilemate or its reader has to know?

Each fact is found by driving the release, and said in a few words, so that two releases that do
the same say the same. docs/releases.md lists between which releases the words change.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from profilemate.simulation import parts
from scripts.vllm_matrix import adapt, cases
from tests.support.scheduler import tokens

SIZE = adapt.BLOCK_SIZE
MAX_STEPS = 1_000
_UNKNOWN = object()


@dataclass
class Seen:
    """What passed between a scheduler and its KV cache manager.

    ``found``: by lookup the tokens that it found. ``stats``: vLLM's own counts of lookups, as it
    gave them away.
    """

    found: list[int] = field(default_factory=list)
    stats: list[Any] = field(default_factory=list)

    def counted(self, name: str) -> int:
        """What vLLM counted in all."""
        return sum(getattr(stats, name) for stats in self.stats if stats is not None)


def _watched(scheduler: Any) -> Seen:
    seen, manager = Seen(), scheduler.kv_cache_manager
    lookup, give = manager.get_computed_blocks, manager.make_prefix_cache_stats

    def get_computed_blocks(*args: Any, **kwargs: Any) -> Any:
        found = lookup(*args, **kwargs)
        seen.found.append(found[1])
        return found

    def make_prefix_cache_stats() -> Any:
        seen.stats.append(give())
        return seen.stats[-1]

    manager.get_computed_blocks = get_computed_blocks
    manager.make_prefix_cache_stats = make_prefix_cache_stats
    return seen


def _add(scheduler: Any, number: int, prompt: list[int], output: int) -> Any:
    request = _maker()(f"request-{number}", prompt, output)
    scheduler.add_request(request)
    return request


@cache
def _maker() -> parts.RequestMaker:
    """One for all requests: up to 0.28 each begins its hashes anew."""
    return parts.RequestMaker(SIZE)


def _step(scheduler: Any, steps: int = MAX_STEPS) -> None:
    """So many steps, or fewer where nothing is left."""
    for _ in range(steps):
        if not scheduler.has_unfinished_requests():
            return
        output = scheduler.schedule()
        scheduler.update_from_output(output, adapt.answer(scheduler, output))


def _usage_of_an_empty_pool(model: Path) -> str:
    scheduler = adapt.build_scheduler(model, 20)
    return "counted as held" if scheduler.kv_cache_manager.block_pool.get_usage() else "left out"


def _own_blocks_after_a_preemption(model: Path) -> str:
    scheduler = adapt.build_scheduler(model, 17)
    seen = _watched(scheduler)
    for number in range(2):
        _add(scheduler, number, tokens(number, 4 * SIZE), 6 * SIZE)
    _step(scheduler)
    # No two prompts are alike: what was found was the preempted request's own.
    assert any(seen.found)
    return "counted as hits" if seen.counted("hits") else "left out"


def _lookups_of_a_waiting_request(model: Path) -> str:
    scheduler = adapt.build_scheduler(model, 11)
    seen = _watched(scheduler)
    _add(scheduler, 0, tokens(0, 6 * SIZE), 2 * SIZE)
    _add(scheduler, 1, tokens(1, 6 * SIZE), 1)
    _step(scheduler)
    assert len(seen.found) > 2
    return "counted once" if seen.counted("requests") == 2 else "counted at each step"


def _blocks_without_a_hash(model: Path) -> str:
    scheduler = adapt.build_scheduler(model, 20)
    queue = scheduler.kv_cache_manager.block_pool.free_block_queue
    before = {block.block_id for block in queue.get_all_free_blocks()}
    _add(scheduler, 0, tokens(0, SIZE + 5), 3)
    _step(scheduler, 1)
    held = before - {block.block_id for block in queue.get_all_free_blocks()}
    _step(scheduler)
    free = queue.get_all_free_blocks()
    (at,) = (
        at for at, block in enumerate(free) if block.block_id in held and block.block_hash is None
    )
    return "to the front of the free queue" if at == 0 else "to its end, as all others"


def _admission_of_a_long_prompt(model: Path) -> str:
    scheduler = adapt.build_scheduler(model, 13, max_num_batched_tokens=2 * SIZE, max_num_seqs=2)
    _add(scheduler, 0, tokens(0, 2 * SIZE), 4 * SIZE)
    _step(scheduler, 2)
    long = _add(scheduler, 1, tokens(1, 11 * SIZE), 9)
    _step(scheduler, 2)
    return "its first chunk" if long in scheduler.running else "all of it"


def _watermark(model: Path) -> str:
    scheduler = adapt.build_scheduler(model, 21, watermark=0.3)
    _add(scheduler, 0, tokens(0, 8 * SIZE - 4), 4 * SIZE)
    _step(scheduler, 2)
    second = _add(scheduler, 1, tokens(1, 8 * SIZE), 9)
    _step(scheduler, 2)
    return "none" if second in scheduler.running else "those of --watermark"


def _abort_in_flight(model: Path) -> str:
    from vllm.v1.request import RequestStatus

    scheduler = adapt.build_scheduler(model, 20, async_scheduling=True)
    scheduler.defer_block_free = True
    request = _add(scheduler, 0, tokens(0, 40), 10)
    output = scheduler.schedule()
    answer = adapt.answer(scheduler, output)
    scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    scheduler.update_from_output(output, answer)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 19
    return "free at once" if free == 19 else "parked until that step has ended, if asked for"


def _lookup_of_a_hybrid_with_a_connector(model: Path) -> str:
    if not cases.CASES["second_lookup"].exists():
        return "get_computed_blocks"
    scheduler = cases.CASES["second_lookup"].build(model)
    manager, asked = scheduler.kv_cache_manager, []
    lookup = manager.get_computed_blocks_for_connector

    def get_computed_blocks_for_connector(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        return lookup(*args, **kwargs)

    manager.get_computed_blocks_for_connector = get_computed_blocks_for_connector
    _add(scheduler, 1, tokens(0, 40), 2)
    _step(scheduler, 1)
    return "get_computed_blocks_for_connector" if asked else "get_computed_blocks"


def _end_of_a_hit(model: Path) -> str:
    large = 4 * SIZE if cases.CASES["partial"].exists() else SIZE
    specs, arguments = [parts.full_attention(large)], {}
    if large > SIZE:
        specs.append(adapt.mamba(large, "align", **cases.CHECKPOINTS))
        arguments["mamba_cache_mode"] = "align"
    scheduler = adapt.build_scheduler(
        model, 40, block_size=large, hash_block_size=SIZE, specs=specs, **arguments
    )
    seen = _watched(scheduler)
    shared = tokens(0, 3 * large + 3 * SIZE)
    for number in range(3):
        _add(scheduler, number, shared + tokens(1 + number, 20 * (number > 0)), 2)
        _step(scheduler)
    assert any(seen.found)
    inside = any(found % large for found in seen.found)
    return "inside a block, too" if inside else "at the end of a block"


def _ways_to_let_go(model: Path) -> str:
    pool = adapt.build_scheduler(model, 20).kv_cache_manager.block_pool
    if not hasattr(pool, "unpin_blocks"):
        return "free_blocks"
    blocks = pool.get_new_blocks(3)
    pool.unpin_blocks(blocks, lambda block: None)
    assert pool.get_num_free_blocks() == 19
    return "free_blocks, and unpin_blocks"


def _window_by_default(model: Path) -> str:
    return _window_blocks(model)


def _window_by_flag(model: Path) -> str:
    return _window_blocks(model, prefix_cache_retention_interval=0)


def _window_by_variable(model: Path) -> str:
    with _variable("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "0"):
        return _window_blocks(model)


def _window_blocks(model: Path, **arguments: Any) -> str:
    """How much of a prompt stays cached in a sliding-window group."""
    if not cases.CASES["window"].exists():
        return "all blocks"
    blocks = 20
    specs = [adapt.full_attention(), adapt.sliding_window(5 * SIZE // 2)]
    scheduler = adapt.build_scheduler(model, 60, specs=specs, **arguments)
    interval = getattr(scheduler.cache_config, "prefix_cache_retention_interval", _UNKNOWN)
    if interval is not _UNKNOWN:
        # As vLLM's own planning of the cache hands it on.
        scheduler.kv_cache_manager.coordinator.retention_interval = interval
    _add(scheduler, 0, tokens(0, blocks * SIZE), 1)
    _step(scheduler)
    pool = scheduler.kv_cache_manager.block_pool
    cached = sum(block.block_hash is not None for block in pool.blocks) - blocks
    return "all blocks" if cached == blocks else "the last blocks of a prompt"


@contextmanager
def _variable(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _hashes_of_two_processes(model: Path) -> str:
    with _variable("PYTHONHASHSEED", None):
        same = _first_hash() == _first_hash()
    return "the same" if same else "different"


def _first_hash() -> Any:
    """What all hashes of a process begin with, in a module that was loaded afresh."""
    import vllm.v1.core.kv_cache_utils as loaded

    assert loaded.__file__
    spec = importlib.util.spec_from_file_location("kv_cache_utils_afresh", loaded.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    if hasattr(module, "init_none_hash"):
        module.init_none_hash(parts.hash_function())
    return module.NONE_HASH


def _unknown_variable(model: Path) -> str:
    with _variable("VLLM_NO_SUCH_VARIABLE", "1"):
        try:
            adapt.build_scheduler(model, 20, fail_on_environ_validation=True)
        except ValueError as error:
            if "VLLM_NO_SUCH_VARIABLE" not in str(error):
                raise
            return "--fail-on-environ-validation refuses"
    return "not looked for"


def _check_of_variables(model: Path) -> str:
    places = (("vllm.envs", ""), ("vllm.platforms.interface", "Platform"))
    for module, owner in places:
        loaded: ModuleType | Any = import_module(module)
        if hasattr(getattr(loaded, owner) if owner else loaded, "validate_environ"):
            return owner or module
    return "nowhere"


def _trial_captures(model: Path) -> str:
    import vllm.envs as envs

    estimates = getattr(envs, "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", None)
    if estimates is None:
        return "no"
    return "by default" if estimates else "if asked for"


def _idle_step(model: Path) -> str:
    from vllm.v1.engine.core import EngineCoreProc

    naps: list[float] = []
    engine = SimpleNamespace(
        step_fn=lambda: ({}, False),
        output_queue=SimpleQueue(),
        post_step=lambda executed: None,
        scheduler=SimpleNamespace(has_unfinished_requests=lambda: True, has_requests=lambda: True),
    )
    with patch.object(time, "sleep", naps.append):
        EngineCoreProc._process_engine_step(engine)
    return f"a pause of {1000 * sum(naps):g} ms" if naps else "no pause"


FACTS: dict[str, Callable[[Path], str]] = {
    "the null block in a pool's usage": _usage_of_an_empty_pool,
    "in vLLM's hit rate, what a preempted request finds of its own": _own_blocks_after_a_preemption,
    "in vLLM's hit rate, lookups of a request that goes on waiting": _lookups_of_a_waiting_request,
    "freed blocks without a hash go": _blocks_without_a_hash,
    "what must fit for a prompt to be admitted": _admission_of_a_long_prompt,
    "blocks that admission leaves free": _watermark,
    "blocks of a request that is aborted with a step in flight": _abort_in_flight,
    "a hybrid with a connector is looked up by": _lookup_of_a_hybrid_with_a_connector,
    "hits end": _end_of_a_hit,
    "references are dropped by": _ways_to_let_go,
    "cached of a sliding-window group, by default": _window_by_default,
    "cached of a sliding-window group, --prefix-cache-retention-interval 0": _window_by_flag,
    "cached of a sliding-window group, VLLM_PREFIX_CACHE_RETENTION_INTERVAL=0": _window_by_variable,
    "block hashes of two processes without PYTHONHASHSEED": _hashes_of_two_processes,
    "unknown VLLM_ variables": _unknown_variable,
    "validate_environ is in": _check_of_variables,
    "start-up captures CUDA graphs on trial": _trial_captures,
    "an engine with requests and nothing to run makes, between two steps": _idle_step,
}


def observe(model: Path) -> dict[str, str]:
    """What this release does, by fact."""
    return {name: _found(fact, model) for name, fact in FACTS.items()}


def _found(fact: Callable[[Path], str], model: Path) -> str:
    """A fact that cannot be found out does not stop the others."""
    try:
        return fact(model)
    except Exception as error:
        return f"not found out: {' '.join(f'{type(error).__name__}: {error}'.split())}"
