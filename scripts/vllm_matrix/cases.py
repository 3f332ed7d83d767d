# SPDX-License-Identifier: Apache-2.0
"""What is each release's scheduler put through?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from profilemate.simulation import parts
from scripts.vllm_matrix import adapt
from tests.support.watching import replaced

BLOCKS = 100
DRAFTS = 3
CHECKPOINTS = {
    "num_prefill_checkpoint_blocks": 1,
    "prefill_checkpoint_alignment": adapt.BLOCK_SIZE,
}
"""Of Mamba states, where prompts end inside a block; for releases that have them."""


def _nothing(scheduler: Any, step: int = 0) -> None:
    """For cases in which nothing comes between the steps."""


def _always() -> bool:
    """For cases that every release has."""
    return True


def _manager_has(method: str) -> bool:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return hasattr(KVCacheManager, method)


def _pool_has(method: str) -> bool:
    from vllm.v1.core.block_pool import BlockPool

    return hasattr(BlockPool, method)


def _has_mamba(mode: str) -> bool:
    """Whether a group can keep Mamba states in this mode."""
    if find_spec("vllm.v1.core.single_type_kv_cache_manager") is None:
        return False
    import vllm.v1.core.single_type_kv_cache_manager as managers
    import vllm.v1.kv_cache_interface as interface

    if not hasattr(managers, "MambaManager"):
        return False
    return mode == "none" or "mamba_cache_mode" in interface.MambaSpec.__dataclass_fields__


@dataclass(frozen=True)
class Case:
    """Requests of the trace, all there at once, on a pool too small for them.

    ``title`` says what it is about. ``in_step`` is what else happens before a step's results come
    in, ``after_step`` what happens after them, and ``at_end`` after the last one. ``lag`` is the
    number of steps that are scheduled before the results of the first of them come in. ``exists``
    says whether the release has what it is about. ``plain``: the tokens that a prefix hit found
    are those of the blocks that it took.
    """

    title: str
    build: Callable[[Path], Any]
    requests: int = 300
    in_step: Callable[[Any, int], None] = _nothing
    after_step: Callable[[Any, int], None] = _nothing
    at_end: Callable[[Any], None] = _nothing
    lag: int = 0
    exists: Callable[[], bool] = _always
    plain: bool = True


def _cached(model: Path) -> Any:
    return adapt.build_scheduler(model, BLOCKS)


def _uncached(model: Path) -> Any:
    return adapt.build_scheduler(model, BLOCKS, enable_prefix_caching=False)


def _chunked(model: Path) -> Any:
    return adapt.build_scheduler(model, BLOCKS // 2, max_num_batched_tokens=64)


def _window(model: Path) -> Any:
    specs = [adapt.full_attention(), adapt.sliding_window(5 * adapt.BLOCK_SIZE // 2)]
    return adapt.build_scheduler(model, BLOCKS, specs=specs)


def _sparse(model: Path) -> Any:
    scheduler = _window(model)
    scheduler.kv_cache_manager.coordinator.retention_interval = 0
    return scheduler


def _retains_sparsely() -> bool:
    if find_spec("vllm.v1.core.kv_cache_coordinator") is None:
        return False
    import vllm.v1.core.kv_cache_coordinator as module

    return hasattr(module, "_validate_prefix_cache_retention_interval")


def _parking(model: Path) -> Any:
    scheduler = adapt.build_scheduler(model, BLOCKS, async_scheduling=True)
    scheduler.defer_block_free = True
    return scheduler


def _speculating(model: Path) -> Any:
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": DRAFTS,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    scheduler = adapt.build_scheduler(model, BLOCKS, speculative_config=speculative)
    # As for a drafter that has a KV cache of its own.
    scheduler.num_lookahead_tokens = DRAFTS
    return scheduler


def _draft(scheduler: Any, step: int) -> None:
    adapt.draft(scheduler, DRAFTS)


def _connected(model: Path) -> Any:
    return adapt.build_scheduler(model, BLOCKS, **adapt.with_connector())


def _connected_hybrid(model: Path) -> Any:
    # With more at once, vLLM 0.33 runs out of blocks that it counted on.
    return _aligned(model, max_num_seqs=4, **adapt.with_connector())


def _states(model: Path) -> Any:
    length = 1024
    # Where block sizes may differ, the scheduler's is a multiple of them all.
    size = length if adapt.hashes_parts_of_blocks() else adapt.BLOCK_SIZE
    specs = [adapt.full_attention(), adapt.mamba(length, "none")]
    return adapt.build_scheduler(
        model, BLOCKS, specs=specs, block_size=size, enable_prefix_caching=False
    )


def _aligned(model: Path, **arguments: Any) -> Any:
    specs = [adapt.full_attention(), adapt.mamba(adapt.BLOCK_SIZE, "align")]
    return adapt.build_scheduler(model, BLOCKS, specs=specs, mamba_cache_mode="align", **arguments)


def _partial(model: Path) -> Any:
    size = 4 * adapt.BLOCK_SIZE
    return adapt.build_scheduler(
        model,
        BLOCKS // 2,
        block_size=size,
        hash_block_size=adapt.BLOCK_SIZE,
        specs=[parts.full_attention(size), adapt.mamba(size, "align", **CHECKPOINTS)],
        mamba_cache_mode="align",
    )


def _pools(model: Path) -> Any:
    """Its second group has a pool of its own, as one has that keeps its blocks on the host."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def with_second_pool(original: Callable[..., Any], manager: Any, *args: Any, **kw: Any) -> None:
        original(manager, *args, **kw)
        group = manager.coordinator.single_type_managers[1]
        group.block_pool = BlockPool(BLOCKS, True, adapt.BLOCK_SIZE)
        group._null_block = group.block_pool.null_block

    with replaced(KVCacheManager, "__init__", with_second_pool):
        return _window(model)


def _pin(scheduler: Any, step: int) -> None:
    """Two blocks are taken, and let go as blocks that may still be read."""
    pool = scheduler.kv_cache_manager.block_pool
    if step % 5 == 0 and pool.get_num_free_blocks() > 2:
        pool.unpin_blocks(pool.get_new_blocks(2), lambda block: None)


def _reset(scheduler: Any) -> None:
    assert scheduler.reset_prefix_cache() is not False


def _refused_reset(scheduler: Any, step: int) -> None:
    if step == 20:
        assert not scheduler.kv_cache_manager.reset_prefix_cache()


def _evict_some(scheduler: Any, step: int) -> None:
    if step % 50 == 0:
        scheduler.kv_cache_manager.evict_blocks(set(range(step % 7, BLOCKS, 5)))


def _abort_some(scheduler: Any, step: int) -> None:
    from vllm.v1.request import RequestStatus

    if step % 40 == 0 and scheduler.running and scheduler.waiting:
        gone = (scheduler.running[0], next(iter(scheduler.waiting)))
        names = [request.request_id for request in gone]
        scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)


CASES = {
    "cached": Case("prefix caching on, evictions and preemptions", _cached),
    "uncached": Case("prefix caching off", _uncached),
    "chunked": Case("prompts in chunks", _chunked, 60),
    "reset": Case(
        "a reset that is refused, and one that is done",
        _cached,
        100,
        after_step=_refused_reset,
        at_end=_reset,
    ),
    "aborts": Case("requests that are aborted", _cached, 150, after_step=_abort_some),
    "window": Case(
        "a sliding-window group beside full attention",
        _window,
        100,
        exists=lambda: find_spec("vllm.v1.core.kv_cache_coordinator") is not None,
        plain=False,
    ),
    "sparse": Case(
        "a sliding-window group of which only the ends of prompts stay cached",
        _sparse,
        100,
        exists=_retains_sparsely,
        plain=False,
    ),
    "evicted": Case(
        "blocks evicted by order (evict_blocks)",
        _cached,
        100,
        after_step=_evict_some,
        exists=lambda: _manager_has("evict_blocks"),
    ),
    "parked": Case(
        "freed blocks that are parked until the steps in flight have ended",
        _parking,
        100,
        after_step=_abort_some,
        lag=1,
        exists=lambda: _manager_has("pop_blocks_for_free"),
    ),
    "speculation": Case("drafts, of which some are rejected", _speculating, 100, after_step=_draft),
    "connector": Case("tokens that a KV connector loads", _connected, 100, plain=False),
    "states": Case(
        "a group of Mamba states beside full attention, prefix caching off",
        _states,
        100,
        exists=lambda: _has_mamba("none"),
    ),
    "mamba": Case(
        "Mamba states at the ends of blocks, prefix caching on",
        _aligned,
        100,
        exists=lambda: _has_mamba("align"),
        plain=False,
    ),
    "partial": Case(
        "contents that end inside a block",
        _partial,
        100,
        exists=lambda: _pool_has("cache_partial_block"),
        plain=False,
    ),
    "second_lookup": Case(
        "a connector beside Mamba states",
        _connected_hybrid,
        100,
        exists=lambda: _manager_has("get_computed_blocks_for_connector"),
        plain=False,
    ),
    "pools": Case(
        "a group with a pool of its own, and blocks that are pinned",
        _pools,
        100,
        in_step=_pin,
        exists=lambda: _pool_has("unpin_blocks"),
        plain=False,
    ),
}
