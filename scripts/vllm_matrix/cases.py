# SPDX-License-Identifier: Apache-2.0
"""What is each release's scheduler put through?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.vllm_matrix import adapt

BLOCKS = 100


def _nothing(scheduler: Any, step: int = 0) -> None:
    """For cases in which nothing comes between the steps."""


def _always() -> bool:
    """For cases that every release has."""
    return True


def _manager_has(method: str) -> bool:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return hasattr(KVCacheManager, method)


@dataclass(frozen=True)
class Case:
    """Requests of the trace, all there at once, on a pool too small for them.

    ``title`` says what it is about. ``after_step`` is what else happens after a step, and
    ``at_end`` after the last one. ``exists`` says whether the release has what it is about.
    ``plain``: the tokens that a prefix hit found are those of the blocks that it took.
    """

    title: str
    build: Callable[[Path], Any]
    requests: int = 300
    after_step: Callable[[Any, int], None] = _nothing
    at_end: Callable[[Any], None] = _nothing
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


def _parking(model: Path) -> Any:
    scheduler = _cached(model)
    scheduler.defer_block_free = True
    return scheduler


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
    "evicted": Case(
        "blocks evicted by order (evict_blocks)",
        _cached,
        100,
        after_step=_evict_some,
        exists=lambda: _manager_has("evict_blocks"),
    ),
    "parked": Case(
        "freed blocks that are parked first",
        _parking,
        100,
        exists=lambda: _manager_has("pop_blocks_for_free"),
    ),
}
