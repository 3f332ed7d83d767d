# SPDX-License-Identifier: Apache-2.0
"""Random workloads: what arrives, what is aborted, reset and evicted, and when."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.kv.recording import Clock
from tests.support.oracle import Oracle
from tests.support.scheduler import (
    RequestMaker,
    answer,
    build_scheduler,
    full_attention,
    sliding_window,
    tokens,
)

MODEL_LENGTH = 512


@dataclass(frozen=True)
class Add:
    """A request arrives: ``shared`` tokens of a family's prefix and ``own`` ones after them."""

    family: int
    shared: int
    own: int
    output: int
    priority: int = 0
    may_read: bool = True


@dataclass(frozen=True)
class Steps:
    """So many steps are scheduled."""

    count: int


@dataclass(frozen=True)
class Abort:
    """The client of a live request goes away."""

    which: int


@dataclass(frozen=True)
class Reset:
    """The prefix cache is to be dropped; refused while blocks are held."""

    running_too: bool = False


@dataclass(frozen=True)
class Evict:
    """Blocks lose their content by name, whoever holds them; every ``stride``-th."""

    first: int
    stride: int


@dataclass(frozen=True)
class Wait:
    """Time passes."""

    milliseconds: int


@dataclass(frozen=True)
class Setting:
    """The scheduler and its pool.

    ``groups``: "full" is one group of full attention, "window" has one of sliding windows of
    two and a half blocks beside it, "mamba" one of states that are kept at block ends, with
    blocks four times as long as what is hashed (``block_size``), and "checkpoints" one whose
    states are kept inside a block, too.
    """

    blocks: int
    block_size: int = 16
    groups: str = "full"
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    caching: bool = True
    policy: str = "fcfs"
    asynchronous: bool = False
    parking: bool = False
    """Freed blocks are kept until the steps in flight have ended."""
    lag: int = 0
    """Steps that are scheduled before the results of the first of them come in."""


Operation = Add | Steps | Abort | Reset | Evict | Wait

adds = st.builds(
    Add,
    family=st.integers(0, 2),
    shared=st.integers(0, 100),
    own=st.integers(1, 60),
    output=st.integers(1, 24),
    priority=st.integers(0, 2),
    may_read=st.sampled_from([True, True, True, False]),
)
steps = st.builds(Steps, st.integers(1, 6))
rare = st.one_of(
    st.builds(Abort, st.integers(0, 7)),
    st.builds(Reset, st.booleans()),
    st.builds(Evict, st.integers(0, 5), st.integers(1, 4)),
    st.builds(Wait, st.sampled_from([1, 300, 1_200])),
)
operations = st.lists(st.one_of(adds, adds, steps, steps, rare), min_size=12, max_size=60)
settings = st.builds(
    Setting,
    blocks=st.integers(4, 40),
    block_size=st.sampled_from([4, 16]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.sampled_from([16, 48, 512]),
    caching=st.sampled_from([True, True, True, False]),
    policy=st.sampled_from(["fcfs", "priority"]),
    asynchronous=st.booleans(),
    parking=st.booleans(),
    lag=st.integers(0, 2),
)


def mixed(requests: int, prompts: int, steps: int) -> list[Operation]:
    """So many requests with so many prompts, steps after each, then one of each rarer operation."""
    return [
        *(
            operation
            for number in range(requests)
            for operation in (Add(number % prompts, 64, 20 + number, 20), Steps(steps))
        ),
        Abort(0),
        Evict(2, 3),
        Steps(steps + 1),
        Reset(),
        Add(0, 64, 9, 4),
    ]


def busy() -> list[Operation]:
    """Some of everything, and requests that run, wait and can never fit at its end."""
    chance = random.Random(7)
    operations: list[Operation] = []
    for number in range(60):
        operations += [
            Add(chance.randrange(3), chance.randrange(100), 1 + chance.randrange(60), 12),
            Steps(1 + chance.randrange(4)),
        ]
        if number % 9 == 0:
            operations.append(Abort(chance.randrange(8)))
        if number % 13 == 0:
            operations.append(Evict(1, 3))
        if number % 17 == 0:
            operations += [Reset(), Reset(running_too=True), Wait(1_100)]
    return [*operations, Steps(300), Add(0, 100, 400, 3), Add(1, 20, 9, 3), Wait(1_300), Steps(20)]


@dataclass
class Driver:
    """Runs operations on one scheduler, moving the clock on before each."""

    scheduler: Any
    oracle: Oracle
    clock: Clock
    setting: Setting
    made: int = 0
    in_flight: deque[tuple[Any, Any]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._make = RequestMaker(self.setting.block_size)
        self.scheduler.defer_block_free = self.setting.parking

    def run(self, operations: list[Operation]) -> None:
        """Run them all, and to the end whatever can run to its end; the rest is aborted."""
        for operation in operations:
            self.do(operation)
        self.drain()

    def drain(self) -> None:
        """Step until nothing is left; a request that can never run is aborted.

        So is one that is preempted by itself for ever.
        """
        idle = steps = 0
        while self.scheduler.requests:
            before, left = len(self.oracle.moves), len(self.scheduler.requests)
            output = self._step()
            moved = output.total_num_scheduled_tokens or len(self.oracle.moves) > before
            idle = 0 if moved else idle + 1
            steps = steps + 1 if len(self.scheduler.requests) == left else 0
            if idle > 5 or steps > 300:
                self._abort(next(iter(self.scheduler.requests)))
                idle = steps = 0
        while self.in_flight:
            self._update()

    def do(self, operation: Operation) -> None:
        """Run one of them."""
        self.clock.tick()
        match operation:
            case Add():
                self._add(operation)
            case Steps(count):
                for _ in range(count):
                    self._step()
            case Abort(which):
                if self.scheduler.requests:
                    names = sorted(self.scheduler.requests)
                    self._abort(names[which % len(names)])
            case Reset(running_too):
                # vLLM raises where blocks that it preempted are parked.
                self.scheduler.reset_prefix_cache(running_too and not self.setting.parking)
                self.oracle.look()
            case Evict(first, stride):
                ids = set(range(first, self.setting.blocks, stride))
                self.scheduler.kv_cache_manager.evict_blocks(ids)
                self.oracle.look()
            case Wait(milliseconds):
                self.clock.tick(1_000 * milliseconds)

    def _add(self, wanted: Add) -> None:
        self.made += 1
        prompt = tokens(wanted.family, 100)[: wanted.shared]
        prompt += tokens(1_000 + self.made, wanted.own)
        request = self._make(
            f"request {self.made}",
            prompt,
            wanted.output,
            prompt_logprobs=None if wanted.may_read else 1,
            priority=wanted.priority,
        )
        self.scheduler.add_request(request)

    def _abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.clock.tick()
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.oracle.look()

    def _step(self) -> Any:
        self.clock.tick()
        output = self.scheduler.schedule()
        self.in_flight.append((output, answer(self.scheduler, output)))
        if len(self.in_flight) > self.setting.lag:
            self._update()
        return output

    def _update(self) -> None:
        self.clock.tick()
        self.scheduler.update_from_output(*self.in_flight.popleft())


def scheduler_for(model: Path, setting: Setting) -> Any:
    """The scheduler that the setting asks for."""
    hashed = setting.block_size
    block_size, specs, arguments = hashed, [full_attention(hashed)], {}
    if setting.groups == "window":
        specs.append(sliding_window(hashed, hashed * 5 // 2))
    elif setting.groups != "full":
        block_size = 4 * hashed
        alignment = hashed if setting.groups == "checkpoints" else None
        specs = [full_attention(block_size), mamba(block_size, alignment)]
        arguments["mamba_cache_mode"] = "align"
    return build_scheduler(
        model,
        setting.blocks,
        block_size=block_size,
        hash_block_size=hashed,
        specs=specs,
        max_num_seqs=setting.max_num_seqs,
        max_model_len=MODEL_LENGTH,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        enable_prefix_caching=setting.caching,
        scheduling_policy=setting.policy,
        async_scheduling=setting.asynchronous,
        **arguments,
    )


def mamba(block_size: int, checkpoint_alignment: int | None) -> Any:
    """The spec of a group of Mamba states, kept at block ends for prefix caching, and where a
    prompt ends, if there is an alignment for that."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(
        block_size=block_size,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=int(checkpoint_alignment is not None),
        prefill_checkpoint_alignment=checkpoint_alignment,
    )
