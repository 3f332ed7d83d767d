# SPDX-License-Identifier: Apache-2.0
"""What does an engine do with these requests under this configuration?

The scheduler, the KV cache manager and the block pool are vLLM's own. The loop around them is that
of its engine core (``step`` and ``step_with_batch_queue`` in vllm/v1/engine/core.py). Its clock
advances by the time of each step, and jumps to the next arrival where there is nothing to do.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.whatif.clock import StepTime
from analysis.whatif.configuration import Configuration
from analysis.whatif.groups import least_blocks
from analysis.whatif.ids import Ids
from analysis.whatif.workload import Workload
from profilemate.simulation import cache_groups, drafting, host_memory, parts
from profilemate.simulation.coming import Coming
from profilemate.simulation.contents import Contents
from profilemate.simulation.drafting import Acceptance, propose
from profilemate.simulation.drops import Drops
from profilemate.simulation.figures import Figures
from profilemate.simulation.host_memory import Transfers

PATIENCE = 3
"""Steps in which a request may have nothing scheduled, with nothing else to wait for."""

TICK_SEC = 1e-6
"""A session's times are exact to the microsecond."""


@dataclass(slots=True)
class Live:
    """A request that has arrived and not ended.

    ``answer``: the answer's tokens; ``after``: the tokens of the prompt before it. ``since``: when
    the scheduler got the request, as a session has it. ``known``: the tokens that it had at its
    admission, which are prefill until they are computed; 0 before that. ``computed``: the tokens
    that it had computed at its preemption, until it runs again. ``acceptance``: with drafts.
    """

    number: int
    request: Any
    answer: list[int]
    after: int
    since: float
    known: int = 0
    computed: int | None = None
    acceptance: Acceptance | None = None


@dataclass(frozen=True)
class Step:
    """A step in flight: what was scheduled, what the model returns, and how long it takes.

    With drafts it depends on earlier steps in flight what the model returns. Then ``answer`` says
    which requests get tokens. ``launched``: when it was scheduled.
    """

    scheduled: Any
    answer: Any
    seconds: float
    launched: float


class Engine:
    """One engine and its requests, from the first arrival to the last end.

    Args:
        model: a folder with a model's configuration.
        configuration: the engine's configuration.
        workload: its requests.
        step_time: how long each step takes.
        prefixes: ids of the requests' prefixes; see ``Contents``.
        begin_sec: what comes before this is warm-up, and is not counted.
        numbers: the requests' numbers among those of all engines; by default they are all.
        ended: called for each request that ends, or that can never run.

    """

    def __init__(
        self,
        model: Path,
        configuration: Configuration,
        workload: Workload,
        step_time: StepTime,
        *,
        prefixes: Ids | None = None,
        begin_sec: float = 0.0,
        numbers: Sequence[int] | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.figures = Figures()
        self._configuration = configuration
        self._workload = workload
        self._step_time = step_time
        self._begin_sec = begin_sec
        self._numbers = range(len(workload)) if numbers is None else numbers
        self._ended = ended
        self._contents = Contents(workload, prefixes)
        self._make = parts.RequestMaker(configuration.hash_block_size or configuration.block_size)
        self._scheduler = _scheduler(model, configuration)
        self._count_evictions()
        self._clock = 0.0
        self._stalls: Counter[tuple[str, int]] = Counter()
        self._coming = Coming(workload, configuration.users)
        self._live: dict[str, Live] = {}
        self._leaving: list[tuple[float, str]] = []
        self._flight: deque[Step] = deque()
        self._drops = Drops(workload, self._scheduler, configuration)
        self._was_reset = False
        self._host: Transfers | None = None
        if configuration.host is not None:
            self._host = Transfers(configuration.host, self._scheduler)
            self.figures.moved = self._host.moved

    def run(self) -> Figures:
        """Run all requests to their end."""
        scheduler, coming = self._scheduler, self._coming
        while True:
            is_busy = self._host is not None and self._host.is_busy
            if not self._live and not self._flight and not is_busy:
                if not coming:
                    return self.figures
                self._clock = max(self._clock, min(coming.next_sec, self._drops.next_sec))
            now = self._clock + TICK_SEC
            self._drop(now)
            while coming.next_sec <= now and coming.next_sec < self._drops.next_sec:
                arrival, number = coming.pop()
                self._arrive(number, arrival)
            self._leave()
            has_work = is_busy or scheduler.has_unfinished_requests()
            scheduled = self._schedule() if has_work else 0
            if self._flight and (not scheduled or len(self._flight) >= self._configuration.batches):
                computes = any(step.scheduled.total_num_scheduled_tokens for step in self._flight)
                is_stuck = not scheduled and not computes
                self._update(self._flight.popleft())
                if is_stuck and not self._waited() and self._live:
                    self._give_up()

    def _waited(self) -> bool:
        """Where nothing can be scheduled: whether the engine has its copies to go on with."""
        if self._host is None:
            return False
        if self._host.has_reported:
            return True
        leaving = (at for at, _ in self._leaving)
        others = (self._coming.next_sec, self._drops.next_sec, *leaving)
        later = self._host.until(self._clock, others)
        self._clock = self._clock if later is None else later
        return later is not None

    @property
    def _counts(self) -> bool:
        return self._clock >= self._begin_sec

    def _count_evictions(self) -> None:
        """Count each block of the pool that loses its content when it is handed out."""
        pool = self._scheduler.kv_cache_manager.block_pool
        evict, hand_out = pool._maybe_evict_cached_block, pool.get_new_blocks
        is_for_room = False

        def handing_out(*arguments: Any, **named: Any) -> Any:
            nonlocal is_for_room
            is_for_room = True
            try:
                return hand_out(*arguments, **named)
            finally:
                is_for_room = False

        def counted(block: Any) -> Any:
            had_content = evict(block)
            self.figures.evictions += bool(had_content) and is_for_room and self._counts
            return had_content

        pool.get_new_blocks = handing_out
        pool._maybe_evict_cached_block = counted

    def _drop(self, now: float) -> None:
        """Drop what the session dropped by now. Its requests arrive in between."""
        while self._drops.next_sec <= now:
            while self._coming.next_sec < self._drops.next_sec:
                arrival, number = self._coming.pop()
                self._arrive(number, arrival)
            if self._drops.waits and (self._live or self._flight):
                return
            if self._host is not None and self._is_loading():
                return
            running = [(each, each.num_computed_tokens) for each in self._scheduler.running]
            self._drops.do_next()
            self._was_reset = bool(running)
            for request, computed in running:
                self._note_preemption(request, computed)

    def _is_loading(self) -> bool:
        """Whether a request waits for a copy, which vLLM does not take its blocks from."""
        statuses = (one.request.status.name for one in self._live.values())
        return "WAITING_FOR_REMOTE_KVS" in statuses

    def _note_preemption(self, request: Any, computed: int) -> None:
        if request.status.name == "PREEMPTED":
            self._live[request.request_id].computed = computed
            self.figures.preemptions += self._counts

    def _arrive(self, number: int, arrival: float) -> None:
        workload = self._workload
        prompt, output = int(workload.input_tokens[number]), int(workload.output_tokens[number])
        configuration = self._configuration
        # The last token of an answer is never computed.
        held = prompt + max(output, 1) - 1
        least = least_blocks(configuration.groups, configuration.block_size, held)
        if least > configuration.num_blocks:
            self._failed(number)
            self._coming.ended(number, self._clock)
            self._ended()
            return
        name = f"request {number:09}"
        tokens, answer = self._contents(number)
        goes_away = bool(workload.aborted[number]) and not output
        request = self._make(
            name,
            tokens,
            configuration.max_model_len if goes_away else max(output, 1),
            priority=int(workload.priority[number]),
            arrival_time=arrival,
        )
        if goes_away:
            stays = float(workload.finish_sec[number] - workload.arrival_sec[number])
            self._leaving.append((arrival + stays, name))
        if workload.counts[number]:
            self.figures.begin_sec = min(self.figures.begin_sec, arrival)
        one = self._live[name] = Live(number, request, answer, prompt, self._clock)
        if configuration.speculation is not None:
            one.acceptance = Acceptance(output - 1, float(workload.answer_steps[number]))
        self._drops.arrived(number, request)
        self._scheduler.add_request(request)

    def _leave(self) -> None:
        """Abort the requests whose clients go away before they had a token."""
        for at, name in [leaving for leaving in self._leaving if leaving[0] <= self._clock]:
            self._leaving.remove((at, name))
            self._abort(name)

    def _abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        if name in self._live:
            self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self._end(name)

    def _end(self, name: str) -> None:
        number = self._live.pop(name).number
        if self._host is not None:
            self._host.forget(name)
        if self._workload.counts[number]:
            self.figures.end_sec = max(self.figures.end_sec, self._clock)
        self._coming.ended(number, self._clock)
        self._ended()

    def _failed(self, number: int) -> None:
        if self._workload.counts[number]:
            self.figures.lookups.failed.add(self._numbers[number])

    def _give_up(self) -> None:
        """Remove a request for which nothing can be scheduled although the whole pool is free.

        One that others' steps or its own preemption make room for is tried a few times: states that
        were cached in this step can be found in the next one, and no earlier.
        """
        stuck = next(iter(self._scheduler.waiting), None) or self._scheduler.running[0]
        stall = stuck.request_id, stuck.num_tokens
        self._stalls[stall] += 1
        if self._stalls[stall] < PATIENCE and self._configuration.groups:
            return
        self._failed(self._live[stuck.request_id].number)
        self._abort(stuck.request_id)

    def _schedule(self) -> int:
        """Schedule a step; returns its tokens."""
        scheduler, live = self._scheduler, self._live
        before = [(request, request.num_computed_tokens) for request in scheduler.running]
        output = self._scheduled()
        for request, computed in before:
            self._note_preemption(request, computed)
        for data in output.scheduled_new_reqs:
            one = live[data.req_id]
            if not one.known:
                self._admitted(one, data.num_computed_tokens)
        prefill, tokens = self._prefill(output), output.total_num_scheduled_tokens
        requests = len(output.num_scheduled_tokens)
        self.figures.steps += bool(tokens) and self._counts
        seconds = self._step_time.seconds(prefill, tokens - prefill, requests) if tokens else 0.0
        if self._configuration.speculation is None:
            answer = parts.answer(scheduler, output, self._sample)
        else:
            answer = parts.sampling(scheduler, output)
        self._flight.append(Step(output, answer, seconds, self._clock))
        return int(tokens)

    def _scheduled(self) -> Any:
        was_reset, self._was_reset = self._was_reset, False
        try:
            return self._scheduler.schedule()
        except AssertionError:
            # Seen in 0.32: it takes the load of a request that a reset has preempted for a store.
            if self._host is None or not was_reset:
                raise
            raise RuntimeError(
                "vLLM's offloading connector fails where a reset preempts requests that it finds "
                "in host memory"
            ) from None

    def _admitted(self, one: Live, found: int) -> None:
        one.known = one.after
        figures, is_later = self.figures, bool(self._workload.counts[one.number])
        in_host = 0
        if self._host is not None:
            found, in_host = self._host.found(one.request.request_id, found)
        # A session's tables count what was admitted after the warm-up, a trace what arrived then.
        if self._counts and (is_later or self._workload.measured is not None):
            # Without prefix caching there is no lookup.
            query = one.after * self._configuration.prefix_caching
            figures.lookups.found[self._numbers[one.number]] = query, int(found)
            if in_host:
                figures.lookups.host[self._numbers[one.number]] = in_host
        if is_later:
            figures.waits.append(self._clock - one.since)

    def _prefill(self, output: Any) -> int:
        """The step's prefill tokens. Also counts the tokens that preempted requests recompute."""
        prefill = 0
        for name, tokens in output.num_scheduled_tokens.items():
            one = self._live[name]
            computed = one.request.num_computed_tokens - tokens
            if one.computed is not None:
                self.figures.recomputed_tokens += max(0, one.computed - computed) * self._counts
                one.computed, one.known = None, one.request.num_tokens
            prefill += min(tokens, max(0, one.known - computed))
        return prefill

    def _sample(self, request: Any) -> int:
        """The next token of the answer; past its end any token will do."""
        one = self._live[request.request_id]
        at = request.num_computed_tokens - one.after
        return one.answer[at] if at < len(one.answer) else 0

    def _drafted(self, step: Step) -> Any:
        """What the model returns for a step with drafts."""
        drafts = step.scheduled.scheduled_spec_decode_tokens
        return parts.answered(
            {
                name: self._accepted(name, len(drafts.get(name, ()))) if is_sampled else []
                for name, is_sampled in step.answer.items()
            }
        )

    def _accepted(self, name: str, drafts: int) -> list[int]:
        one = self._live.get(name)
        if one is None or one.acceptance is None:
            return [0]
        at = one.request.num_output_tokens
        # What is drafted for the first token was drafted of nothing.
        count = one.acceptance.next(drafts) if at and drafts else 1
        return [*one.answer[at : at + count]] or [0]

    def _update(self, step: Step) -> None:
        speculation = self._configuration.speculation
        answer = step.answer if speculation is None else self._drafted(step)
        if self._host is None:
            self._clock += step.seconds
        else:
            self._host.counts = self._counts
            self._clock, answer.kv_connector_output = self._host.step(
                step.scheduled.kv_connector_metadata,
                launched=step.launched,
                begin=self._clock,
                seconds=step.seconds,
            )
        self._scheduler.update_from_output(step.scheduled, answer)
        if speculation is not None and not self._configuration.async_scheduling:
            propose(self._scheduler, list(step.scheduled.num_scheduled_tokens), speculation.tokens)
        for name in step.scheduled.num_scheduled_tokens:
            if name in self._live and name not in self._scheduler.requests:
                self._end(name)


def _scheduler(model: Path, configuration: Configuration) -> Any:
    settings: dict[str, Any] = {
        "max_num_seqs": configuration.max_num_seqs,
        "max_num_batched_tokens": configuration.max_num_batched_tokens,
        "enable_prefix_caching": configuration.prefix_caching,
        "scheduling_policy": configuration.policy,
        "enable_chunked_prefill": configuration.chunked_prefill,
        "max_model_len": configuration.max_model_len,
        "async_scheduling": configuration.async_scheduling,
        "max_num_active_seqs": configuration.max_num_active_seqs,
        "max_num_scheduled_tokens": configuration.max_num_scheduled_tokens,
        "scheduler_reserve_full_isl": configuration.scheduler_reserve_full_isl,
        "watermark": configuration.watermark,
        "long_prefill_token_threshold": configuration.long_prefill_token_threshold,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return parts.build_scheduler(
        model,
        configuration.gpu_blocks,
        block_size=configuration.block_size,
        **cache_groups.arguments(configuration),
        **host_memory.arguments(configuration.host, configuration.gpu_blocks),
        **drafting.arguments(model, configuration.speculation),
        **given,
    )
