# SPDX-License-Identifier: Apache-2.0
"""Record the scheduler's steps: what each scheduled, and for which requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import compress
from types import SimpleNamespace
from typing import Any

from profilemate.format.events import More, Op
from profilemate.hooks.instances import has_method, hook, reference, require_method
from profilemate.hooks.kv.engine_parts import EngineParts
from profilemate.hooks.kv.requests import Requests
from profilemate.hooks.parts import Part
from profilemate.record import encode
from profilemate.record.recorder import Recorder

REPEAT_NS = 250_000_000
"""How often steps are written that only repeat the last one. There may be a thousand a second."""

Awaited = tuple[int, Any]
"""A running request without a token so far, and its number before it."""


class Steps:
    """Records one scheduler's steps. Holds the scheduler and its pools weakly.

    ``updating``: vLLM is processing the results of a step.
    """

    def __init__(
        self,
        scheduler: Any,
        pools: list[Any],
        recorder: Recorder,
        parts: EngineParts,
        requests: Requests,
        *,
        tabled: bool,
    ) -> None:
        self._scheduler = reference(scheduler)
        self._counts = _request_counts if has_method(scheduler, "get_request_counts") else _lengths
        self._free_counts: Callable[[], Sequence[int]] = lambda: (0,) * len(pools)
        with parts.blocks.attaching():
            self._free_counts = _free_counts_of(pools)
        self._parts = parts
        self._recorder = recorder
        self._keep = recorder.keep
        self._requests = requests
        self._tabled = tabled
        self._no_blocks = [()] * len(scheduler.kv_cache_config.kv_cache_groups)
        self._prefills: dict[str, int] = {}
        self._awaiting: list[Awaited] = []
        self._idle_signature: tuple[Any, ...] | None = None
        self._last_written_ns = 0
        self.updating = False

    def carry(self, request: Any) -> None:
        """A request ran before the recording went on; some of its prompt may not be computed."""
        left = request.num_tokens - request.num_computed_tokens
        if left > 0:
            self._prefills[request.request_id] = left

    def forget_prefill(self, request_id: str) -> None:
        """The request was preempted or has ended, so its prompt is no longer computed."""
        self._prefills.pop(request_id, None)

    @property
    def has_news(self) -> bool:
        """Whether there is an event since the last step ended."""
        return self._recorder.has_news

    def settle(self) -> None:
        """Have events outside a step written at once: no step may follow."""
        if not self.updating:
            self._record_update()
            self._recorder.step_ended()

    def scheduled(self, output: Any, began: int, ended: int) -> None:
        """A step was scheduled."""
        recorder = self._recorder
        scheduler = self._scheduler()
        running, waiting = self._counts(scheduler)
        tokens = output.total_num_scheduled_tokens
        signature = None
        if not tokens:
            events = recorder.under_way()
            if all(event[1] is Op.LOOKUP for event in events):
                signature = (running, waiting, [event[-1] for event in events])
                if signature == self._idle_signature:
                    self._repeat(ended)
                    return
        self._idle_signature = signature
        encoded = getattr(output, "scheduled_encoder_inputs", None)
        if encoded:
            values = [sum(map(len, encoded.values())), _encoder_tokens(scheduler, encoded)]
            self._keep((encode.more, Op.MORE, ended, More.ENCODER, values))
        prefill_tokens = self._assign(scheduler, output)
        if self._requests.forgotten_by_steps:
            for request_id in output.finished_req_ids:
                self.forget_prefill(request_id)
                has_finished = not self._parts.requests.lost
                self._requests.forget(request_id, ended, has_finished=has_finished)
        self._requests.looked_up.clear()
        requests = len(output.num_scheduled_tokens)
        numbers = running, waiting, tokens, prefill_tokens, requests, *self._free_counts()
        self._keep((encode.between, Op.STEP, began, ended, numbers))
        recorder.step_ended()
        self._last_written_ns = ended
        recorder.costs.hook_ns += time.monotonic_ns() - ended

    def updated(self, began: int) -> None:
        """vLLM has processed the results of a step, which it got at ``began``."""
        self.updating = False
        if self._awaiting:
            self._record_first_tokens(began)
        if self._recorder.has_news:
            self._record_update()
            self._recorder.step_ended()

    def _record_first_tokens(self, began: int) -> None:
        awaiting, first = [], []
        for number, request in self._awaiting:
            if request.num_output_tokens:
                first.append(number)
            elif not request.is_finished():
                awaiting.append((number, request))
        self._awaiting = awaiting
        if first:
            self._keep((encode.once, Op.FIRST_TOKEN, began, (len(first), *first)))

    def _record_update(self) -> None:
        """Record the scheduler's state outside a step."""
        numbers = *self._counts(self._scheduler()), *self._free_counts()
        self._keep((encode.once, Op.UPDATE, time.monotonic_ns(), numbers))
        self._idle_signature = None

    def _repeat(self, ended: int) -> None:
        recorder = self._recorder
        recorder.take_back()
        self._requests.looked_up.clear()
        recorder.repeats += 1
        recorder.repeated_until_ns = ended
        if ended - self._last_written_ns > REPEAT_NS:
            recorder.step_ended()
            self._last_written_ns = ended

    def _assign(self, scheduler: Any, output: Any) -> int:
        """Record which requests got the step's new blocks; returns the step's prefill tokens."""
        scheduled = output.num_scheduled_tokens
        prefill_tokens = self._continue_prefills(scheduled) if self._prefills else 0
        for data in output.scheduled_new_reqs:
            prefill_tokens += self._admit(
                scheduler, data.req_id, data.num_computed_tokens, data.block_ids, scheduled
            )
        cached = output.scheduled_cached_reqs
        if isinstance(cached, list):
            cached = _by_column(cached)
        ids, blocks = cached.req_ids, cached.new_block_ids
        resumed = getattr(cached, "resumed_req_ids", None)
        if resumed is None:
            resumed = _resumed(cached)
        if resumed:
            # They are a set; the list has the order in which they were scheduled.
            for at, request_id in enumerate(ids):
                if request_id in resumed:
                    computed = cached.num_computed_tokens[at]
                    prefill_tokens += self._admit(
                        scheduler, request_id, computed, blocks[at], scheduled
                    )
            others = [at for at, request_id in enumerate(ids) if request_id not in resumed]
            ids, blocks = [ids[at] for at in others], [blocks[at] for at in others]
        handed_out = list(filter(None, blocks))
        if handed_out:
            numbers = list(map(self._requests.index.__getitem__, compress(ids, blocks)))
            self._keep((encode.assigned, Op.ASSIGN, numbers, handed_out))
        return prefill_tokens

    def _admit(
        self,
        scheduler: Any,
        request_id: str,
        computed: int,
        groups: Any,
        scheduled: dict[str, int],
    ) -> int:
        """Record that a request runs from now on; returns its prefill tokens in this step."""
        number = self._requests.index.get(request_id)
        request = scheduler.requests[request_id]
        if number is None:
            number = self._requests.number(request, time.monotonic_ns())
        groups = _by_group(groups)
        if groups and self._tabled and number in self._requests.looked_up:
            numbers = number, computed, len(groups[0])
            self._keep((encode.untimed, Op.ADMIT_LOOKED_UP, numbers))
        else:
            # A model runner in this process goes on filling the lists.
            lists = [list(group) for group in groups or self._no_blocks]
            self._keep((encode.held, Op.ADMIT, (number, computed), lists))
        awaits = not (request.num_output_tokens or self._parts.updates.lost)
        if awaits and request.sampling_params is not None:
            self._awaiting.append((number, request))
        left: int = request.num_tokens - computed
        tokens = scheduled[request_id]
        if tokens < left:
            self._prefills[request_id] = left - tokens
        return min(tokens, left)

    def _continue_prefills(self, scheduled: dict[str, int]) -> int:
        """The step's tokens of prompts that earlier steps began."""
        total = 0
        for request_id, left in list(self._prefills.items()):
            tokens = scheduled.get(request_id, 0)
            if tokens < left:
                self._prefills[request_id] = left - tokens
                total += tokens
            else:
                del self._prefills[request_id]
                total += left
        return total


def watch(
    scheduler: Any,
    steps: Steps,
    recorder: Recorder,
    parts: EngineParts,
    requests: Requests,
    pause: Callable[[], None],
) -> None:
    """Hook the methods of one scheduler. ``pause`` is called after a step where the user wants it.

    Raises:
        AttributeError: it has no ``schedule``, so that nothing can be recorded.

    """
    _watch_schedule(scheduler, steps, recorder, pause)
    with parts.updates.attaching():
        _watch_update(scheduler, steps, parts.updates)
    with parts.requests.attaching():
        _watch_arrival(scheduler, parts.requests, requests)
        _watch_end(scheduler, steps, parts.requests, requests)
        _watch_abort(scheduler, steps, parts.requests)


def _watch_schedule(
    scheduler: Any, steps: Steps, recorder: Recorder, pause: Callable[[], None]
) -> None:
    now = time.monotonic_ns

    is_cut_short = False

    def after(output: Any, began: int) -> None:
        try:
            if is_cut_short:
                # vLLM goes on with blocks that no step's output ever gave to a request.
                raise RuntimeError("the step before ended half-way")
            steps.scheduled(output, began, now())
            if recorder.wants_pause:
                pause()
        except Exception as error:
            recorder.fail("schedule", error)

    def failed(_: int) -> None:
        """Most likely the end, as an engine that is asked to end unwinds: as after a kill, the step
        under way is not recorded. Without its output, its events make no sense."""
        nonlocal is_cut_short
        is_cut_short = True
        recorder.take_back()

    recorder.on_stop(hook(scheduler, "schedule", before=now, after=after, failed=failed))


def _watch_update(scheduler: Any, steps: Steps, part: Part) -> None:
    name, now = "update_from_output", time.monotonic_ns

    def before() -> int:
        steps.updating = True
        return now()

    def end(began: int) -> None:
        try:
            steps.updated(began)
        except Exception as error:
            part.fail(name, error)

    part.on_stop(hook(scheduler, name, before=before, lastly=end, given="place"))


def _watch_arrival(scheduler: Any, part: Part, requests: Requests) -> None:
    def before(request: Any) -> None:
        try:
            requests.number(request, time.monotonic_ns())
        except Exception as error:
            part.fail("add_request", error)

    part.on_stop(hook(scheduler, "add_request", "request", before=before, given="place"))


def _watch_end(scheduler: Any, steps: Steps, part: Part, requests: Requests) -> None:
    def before(request: Any) -> None:
        try:
            requests.finish(request, time.monotonic_ns())
            steps.forget_prefill(request.request_id)
        except Exception as error:
            part.fail("_free_request", error)

    part.on_stop(hook(scheduler, "_free_request", "request", before=before, given="place"))


def _watch_abort(scheduler: Any, steps: Steps, part: Part) -> None:
    def after(_: Any) -> None:
        try:
            if steps.has_news:
                steps.settle()
        except Exception as error:
            part.fail("finish_requests", error)

    part.on_stop(hook(scheduler, "finish_requests", after=after))


def _encoder_tokens(scheduler: Any, encoded: dict[str, list[int]]) -> int | None:
    """Tokens that these items of requests become in the encoder; None where a release does not say
    so as others do."""
    try:
        return sum(
            _tokens_of_item(scheduler.requests[request_id], item)
            for request_id, items in encoded.items()
            for item in items
        )
    except Exception:
        return None


def _tokens_of_item(request: Any, item: int) -> int:
    count = getattr(request, "get_num_encoder_embeds", None) or request.get_num_encoder_tokens
    return int(count(item))


def _request_counts(scheduler: Any) -> tuple[int, int]:
    """Running and waiting requests."""
    counts: tuple[int, int] = scheduler.get_request_counts()
    return counts


def _lengths(scheduler: Any) -> tuple[int, int]:
    """The same, where the scheduler does not count them itself."""
    return len(scheduler.running), len(scheduler.waiting)


def _free_counts_of(pools: list[Any]) -> Callable[[], Sequence[int]]:
    """The function that counts the free blocks of each pool. It does not keep the pools alive."""
    for pool in pools:
        require_method(pool, "get_num_free_blocks")
    references = [reference(pool) for pool in pools]
    if len(references) > 1:
        return lambda: [pool().get_num_free_blocks() for pool in references]
    (only,) = references
    return lambda: (only().get_num_free_blocks(),)


def _by_column(rows: list[Any]) -> Any:
    """The running requests' data by column, where a release has it by request, as vLLM 0.8.5 has
    and all that follow it up to the first with ``req_ids``."""
    return SimpleNamespace(
        req_ids=[row.req_id for row in rows],
        new_block_ids=[_by_group(row.new_block_ids) for row in rows],
        num_computed_tokens=[row.num_computed_tokens for row in rows],
        resumed_from_preemption=[row.resumed_from_preemption for row in rows],
    )


def _by_group(block_ids: Any) -> Any:
    """A list of block ids for each group. vLLM 0.8.5, with its one group, has no list around it."""
    return [block_ids] if block_ids and isinstance(block_ids[0], int) else block_ids


def _resumed(cached: Any) -> set[str]:
    """Ids of the requests that run again after a preemption, where a release has no such set."""
    return set(compress(cached.req_ids, getattr(cached, "resumed_from_preemption", ())))
