# SPDX-License-Identifier: Apache-2.0
"""Watch one engine's KV cache: its scheduler, its KV cache manager and its block pools."""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any

from profilemate import config
from profilemate.format import content_key
from profilemate.format.errors import SessionError
from profilemate.hooks import targets
from profilemate.hooks.instances import reference
from profilemate.hooks.kv import block_pool, contents, drafts, facts, kv_cache_manager, steps
from profilemate.hooks.kv.bare import hashers
from profilemate.hooks.kv.deployment import deployment_of
from profilemate.hooks.kv.engine_parts import EngineParts
from profilemate.hooks.kv.pausing import Pausing
from profilemate.hooks.kv.requests import Requests, hashes_of
from profilemate.hooks.producers import open_journal
from profilemate.messages import cause, give_up, say
from profilemate.record import launch
from profilemate.record.recorder import Recorder

_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(scheduler: Any) -> None:
    """Begin to record what this scheduler does. Never raises; says why it cannot."""
    try:
        settings = config.read(os.environ)
        if settings.enabled and scheduler not in _watched:
            _watched.add(scheduler)
            _watch(scheduler, settings)
    except SessionError as error:
        give_up(str(error))
    except Exception as error:
        version = getattr(sys.modules.get("vllm"), "__version__", "of unknown version")
        give_up(f"profilemate does not know this vLLM, {version} ({cause(error)})")


def _watch(scheduler: Any, settings: config.Config) -> None:
    manager = scheduler.kv_cache_manager
    pools = _pools(manager)
    rank = facts.engine_rank(scheduler.vllm_config)
    described = {
        **facts.describe(scheduler, pools),
        **contents.describe(scheduler, pools),
        "deployment": deployment_of(settings, scheduler.vllm_config),
        "phases": settings.phases,
    }
    opened = open_journal(settings, "engine", rank, described)
    if opened is None:
        return
    place, recorder = opened
    try:
        key = content_key.key_of(place.founding, described["content_basis"])
        _attach(scheduler, pools, key, recorder)
    except Exception as error:
        recorder.fail("attaching", error)
        recorder.close()
        return
    weakref.finalize(scheduler, recorder.close)
    launch.start(place.directory)
    if settings.verbose:
        say(f"engine {rank} records into {place.directory}")


def _attach(
    scheduler: Any,
    pools: list[Any],
    key: bytes,
    recorder: Recorder,
    earlier: tuple[Requests, EngineParts] | None = None,
) -> tuple[Requests, steps.Steps]:
    """Put the hooks in place. ``earlier`` ones recorded the same scheduler, up to a pause.

    Raises:
        Exception: nothing can be recorded of this scheduler.

    """
    manager = scheduler.kv_cache_manager
    tabled = facts.is_tabled(scheduler, pools)
    requests = Requests(
        recorder,
        key,
        hashes_of(manager),
        hashers(manager),
        hashes_on_finish=not facts.is_plain(scheduler),
        prefix_unit=facts.prefix_unit(scheduler, pools),
        next_number=earlier[0].next_number if earlier is not None else 0,
    )
    parts = EngineParts(recorder, requests)
    if earlier is not None:
        parts.stay_lost(earlier[1])
    recorded_steps = steps.Steps(scheduler, pools, recorder, parts, requests, tabled=tabled)
    context = block_pool.FreeContext()
    this, pools_of = reference(scheduler), [reference(pool) for pool in pools]

    def attach_again() -> tuple[Requests, steps.Steps]:
        these = [pool() for pool in pools_of]
        return _attach(this(), these, key, recorder, (requests, parts))

    pausing = Pausing(scheduler, pools, recorder, attach_again)
    steps.watch(scheduler, recorded_steps, recorder, parts, requests, pausing.pause)
    with parts.blocks.attaching():
        for number, pool in enumerate(pools):
            block_pool.watch(
                pool,
                number,
                parts.blocks,
                requests,
                context,
                recorded_steps.settle,
                alone=len(pools) == 1,
                tabled=tabled,
                evicts_directly=facts.has_mamba(scheduler),
            )
    drafts.watch(scheduler, recorder, requests)
    forget_prefill = recorded_steps.forget_prefill
    with parts.frees.attaching():
        kv_cache_manager.watch_frees(
            manager, parts.frees, requests, context, forget_prefill, tabled=tabled
        )
    with parts.lookups.attaching():
        kv_cache_manager.watch_lookups(manager, parts.lookups, requests)
    parts.leave_lost()
    owners = {
        targets.POOL: pools,
        targets.MANAGER: [manager],
        targets.SCHEDULER: [scheduler],
    }
    recorder.status(methods=targets.attached_and_missing(owners, facts.versions()["vllm"] or ""))
    return requests, recorded_steps


def _pools(manager: Any) -> list[Any]:
    """The manager's block pools, its own first. A group may have another."""
    pools = [manager.block_pool]
    coordinator = getattr(manager, "coordinator", None)
    for group in getattr(coordinator, "single_type_managers", ()):
        if not any(group.block_pool is pool for pool in pools):
            pools.append(group.block_pool)
    return pools
