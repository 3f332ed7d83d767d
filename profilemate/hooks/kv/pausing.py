# SPDX-License-Identifier: Apache-2.0
"""Stop recording an engine between two steps, and go on later.

While the recording is paused no hook is left but one, behind ``schedule``, that looks whether it is
to go on. What happened meanwhile is not known. So when it goes on, the journal gets how things
stand: the requests that are there, and each pool's blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from profilemate.format.events import Op, op_of
from profilemate.hooks.instances import hook, reference
from profilemate.hooks.kv.kv_cache_manager import table_of
from profilemate.hooks.kv.requests import Requests, group_of, hash_bytes
from profilemate.hooks.kv.steps import Steps
from profilemate.messages import say
from profilemate.record import encode
from profilemate.record.recorder import Recorder

BLOCK_BYTES = 200
"""What a block's state takes in memory, until it is in the journal."""


class Pausing:
    """The pauses of one engine's recording. Holds the scheduler and its pools weakly.

    ``attach`` puts the hooks back, and returns what numbers the requests from then on, and what
    records the steps.
    """

    def __init__(
        self,
        scheduler: Any,
        pools: list[Any],
        recorder: Recorder,
        attach: Callable[[], tuple[Requests, Steps]],
    ) -> None:
        self._scheduler = reference(scheduler)
        self._pools = [reference(pool) for pool in pools]
        self._recorder = recorder
        self._attach = attach
        self._has_refused = False

    def pause(self) -> None:
        """A step has ended: record nothing from here on."""
        recorder = self._recorder
        if not all(hasattr(pool(), "blocks") for pool in self._pools):
            self._refuse()
            return
        recorder.keep((encode.once, Op.PAUSE, time.monotonic_ns(), ()))
        recorder.step_ended()
        recorder.take_hooks_away()
        recorder.is_paused = True

        def look(_: Any) -> None:
            if recorder.wants_pause:
                return
            try:
                self._go_on()
            except Exception as error:
                recorder.fail("resuming", error)

        recorder.on_stop(hook(self._scheduler(), "schedule", after=look))

    def _refuse(self) -> None:
        """Of a pool that does not list its blocks nobody could say later how it stands."""
        if not self._has_refused:
            self._has_refused = True
            say(f"{self._recorder.name}: the recording cannot be paused with this block pool")

    def _go_on(self) -> None:
        recorder, scheduler = self._recorder, self._scheduler()
        recorder.take_hooks_away()
        recorder.is_paused = False
        requests, steps = self._attach()
        for event in _requests(scheduler, requests, steps):
            recorder.keep(event)
        counts = len(scheduler.running), _waiting(scheduler)
        for number, pool in enumerate(self._pools):
            event, size = _state(pool(), number, counts)
            recorder.keep(event)
            recorder.weigh(size)
        recorder.step_ended()


def _requests(scheduler: Any, requests: Requests, steps: Steps) -> Iterator[encode.Event]:
    """Number the requests that are there; yields the block table of each that has one."""
    manager, now = scheduler.kv_cache_manager, time.monotonic_ns()
    running = {request.request_id for request in scheduler.running}
    for request in list(scheduler.requests.values()):
        if not request.is_finished():
            number = requests.carry(request, now)
            if request.request_id in running:
                steps.carry(request)
                yield table_of(manager, request.request_id, number)
            elif _loads(request):
                yield table_of(manager, request.request_id, number)


def _loads(request: Any) -> bool:
    """Whether it has blocks, which a KV connector fills, and does not run yet."""
    return getattr(request.status, "name", "") == "WAITING_FOR_REMOTE_KVS"


def _waiting(scheduler: Any) -> int:
    counts = getattr(scheduler, "get_request_counts", None)
    return int(counts()[1]) if counts is not None else len(scheduler.waiting)


def _state(pool: Any, number: int, counts: tuple[int, int]) -> tuple[encode.Event, int]:
    """The blocks of one pool as Op.RESUME, and about how many bytes that is."""
    null = getattr(pool, "null_block", None)
    standing = [
        (block.block_id, block.ref_cnt, block_hash)
        for block in pool.blocks
        if ((block_hash := block.block_hash) is not None or block.ref_cnt > 0) and block is not null
    ]
    op, now = op_of(Op.RESUME, number), time.monotonic_ns()
    event = encode.resumed, op, now, *counts, standing, group_of, hash_bytes
    return event, BLOCK_BYTES * len(standing)
