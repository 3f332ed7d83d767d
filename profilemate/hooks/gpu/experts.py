# SPDX-License-Identifier: Apache-2.0
"""Record which experts of a mixture-of-experts (MoE) model get how many tokens.

A hook at each layer's router copies what it chose, on the device. When an execution that serves
requests has ended, the copies are counted, and now and then the counts are read (see
``expert_counts``). Dummy runs, warm-up and captures of CUDA graphs run through the routers, too,
and nothing is counted after them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from profilemate.format.events import More, Op
from profilemate.hooks.gpu import expert_ranks, serving
from profilemate.hooks.gpu.expert_counts import Counts, Reading
from profilemate.hooks.gpu.expert_layers import (
    METHOD,
    Layer,
    UncountableError,
    find,
    is_moe,
    own_rows,
    why_not,
)
from profilemate.hooks.gpu.graphs import Graphs
from profilemate.hooks.instances import has_method, hook, reference
from profilemate.hooks.kv.facts import engine_rank
from profilemate.hooks.parts import Part
from profilemate.messages import cause, say
from profilemate.record import encode

LEAST_SEC, MOST_SEC, SHARE = 1.0, 10.0, 1 / 60
"""Counts are read so often, in seconds, or when this share of the time since the first has passed
again. So a short run has many rows, and a long one not too many."""

PAIRS_LEAST_SEC, PAIRS_MOST_SEC, PAIRS_SHARE = 10.0, 600.0, 1 / 10
"""The same for pairs of experts. Each report of them replaces the one before."""

PATIENCE_SEC = 1.0
"""How long the end of the worker waits for the last counts."""

_now = time.monotonic_ns


class _Pending(NamedTuple):
    """Counts that are being read. ``ended_ns``: when they were. ``table``: EPLB's, if it has
    one."""

    reading: Reading
    ended_ns: int
    tokens: int
    table: Reading | None = None


class _Schedule:
    """When to read next. It begins with the first thing to read."""

    def __init__(self, least_sec: float, most_sec: float, share: float) -> None:
        self._least_sec, self._most_sec, self._share = least_sec, most_sec, share
        self._began: int | None = None
        self._next = 0

    def is_due(self, now: int) -> bool:
        if self._began is None:
            self._began = now
            self._next = now + round(self._least_sec * 1e9)
        return now >= self._next

    def done(self, now: int) -> None:
        since_sec = (now - (self._began or now)) / 1e9
        pause_sec = min(max(self._least_sec, since_sec * self._share), self._most_sec)
        self._next = now + round(pause_sec * 1e9)


class Experts:
    """Records the experts of one worker, in the journal of its ``graphs``.

    ``seen`` says of each layer whether its router has been asked. ``table`` returns where EPLB has
    which experts, a tensor on the device; None where it does not decide that.
    """

    def __init__(
        self,
        graphs: Graphs,
        rank: int,
        layers: Sequence[Layer],
        counts: Counts,
        table: Callable[[], Any],
    ) -> None:
        self.part = Part(graphs.recorder, "experts")
        # The routers lead to the model, which this outlives.
        self.layers = [layer._replace(router=None) for layer in layers]
        self.seen = [False] * len(layers)
        self._graphs = graphs
        self._recorder = graphs.recorder
        self._rank = rank
        self._counts = counts
        self._table = table
        self._since_ns = _now()
        self._read_tokens = 0
        self._known: Any = None
        self._pending: _Pending | None = None
        self._pending_pairs: _Pending | None = None
        self._next = _Schedule(LEAST_SEC, MOST_SEC, SHARE)
        self._next_pairs = _Schedule(PAIRS_LEAST_SEC, PAIRS_MOST_SEC, PAIRS_SHARE)
        self._was_paused = False

    def chosen_by(self, place: int) -> Callable[[Any], None]:
        """What takes the result of this layer's router."""

        def take(result: Any) -> None:
            try:
                chosen = result[1]
                begin, end = own_rows(chosen.shape[0], self._rank)
                self._counts.copy(place, chosen[begin:end])
                self.seen[place] = True
            except Exception as error:
                self.part.fail(METHOD, error)

        return take

    def executed(self, scheduler_output: Any, _: Any) -> None:
        """An execution has ended that was no dummy."""
        recorder = self._recorder
        is_paused = recorder.wants_pause or recorder.is_paused
        if is_paused:
            if not self._was_paused:
                self.read_all()
            self._graphs.is_paused()
        self._was_paused = is_paused
        if is_paused or self.part.lost:
            return
        tokens = int(scheduler_output.total_num_scheduled_tokens)
        if tokens:
            self._require_all()
            self._counts.count(tokens)
        self._report()
        now = _now()
        if self._next.is_due(now) and self._pending is None:
            self._read(now)
            self._next.done(now)
        if self._next_pairs.is_due(now) and self._pending_pairs is None:
            self._read_pairs(now)
            self._next_pairs.done(now)
        self._report()

    def read_all(self) -> None:
        """Read all counts and wait a little for them: nothing more comes, or not soon."""
        if self.part.lost:
            return
        self._wait()
        now = _now()
        self._read(now)
        self._read_pairs(now)
        self._wait()

    def _require_all(self) -> None:
        """The model has run: its routers have been asked, unless kernels route by themselves.

        Raises:
            UncountableError: some were not.

        """
        unseen = self.seen.count(False)
        if unseen:
            raise UncountableError(
                f"the routers of {unseen} of {len(self.seen)} MoE layers are not asked: a kernel "
                "routes by itself"
            )

    def _read(self, now: int) -> None:
        counts = self._counts
        if counts.tokens > self._read_tokens:
            torch, table = sys.modules["torch"], self._table()
            self._pending = _Pending(
                Reading(torch, counts.of_experts),
                now,
                counts.tokens,
                None if table is None else Reading(torch, table),
            )

    def _read_pairs(self, now: int) -> None:
        counts = self._counts
        if counts.of_pairs is not None and counts.tokens:
            torch = sys.modules["torch"]
            reading = Reading(torch, counts.strongest_pairs())
            self._pending_pairs = _Pending(reading, now, counts.tokens)

    def _wait(self) -> None:
        give_up = time.monotonic() + PATIENCE_SEC
        self._report()
        while self._pending or self._pending_pairs:
            if time.monotonic() > give_up:
                self._pending = self._pending_pairs = None
                return
            time.sleep(0.001)
            self._report()

    def _report(self) -> None:
        if self._pending is not None and self._report_experts(self._pending):
            self._pending = None
        if self._pending_pairs is not None and self._report_pairs(self._pending_pairs):
            self._pending_pairs = None

    def _report_experts(self, pending: _Pending) -> bool:
        numbers = pending.reading.result()
        table = None if pending.table is None else pending.table.result()
        if numbers is None or (table is None and pending.table is not None):
            return False
        news = (numbers if self._known is None else numbers - self._known)[:, :-1].tolist()
        tokens = pending.tokens - self._read_tokens
        values = [
            [layer.number, of_layer[: layer.experts], _by_rank(layer, of_layer, place, table)]
            for place, (layer, of_layer) in enumerate(zip(self.layers, news, strict=True))
        ]
        self._keep(pending.ended_ns, More.EXPERTS, [self._since_ns, tokens, values])
        self._known, self._read_tokens = numbers, pending.tokens
        self._since_ns = pending.ended_ns
        return True

    def _report_pairs(self, pending: _Pending) -> bool:
        numbers = pending.reading.result()
        if numbers is None:
            return False
        values = [
            [layer.number, int(one), int(other), int(both), expected, *map(int, of_each)]
            for layer, of_layer in zip(self.layers, numbers.tolist(), strict=True)
            for one, other, both, expected, *of_each in of_layer
            if both
        ]
        self._keep(pending.ended_ns, More.EXPERT_PAIRS, [pending.tokens, values])
        return True

    def _keep(self, now: int, kind: More, values: list[Any]) -> None:
        numbers = sum(len(of_layer[1]) if kind == More.EXPERTS else 7 for of_layer in values[-1])
        self._recorder.weigh(32 * numbers)
        self._recorder.keep((encode.more, Op.MORE, now, kind, values))
        self._recorder.step_ended()


def counts_here(config: Any, rank: int) -> bool:
    """Whether this worker is to count: its model has experts, and of tensor-parallel ranks, which
    all route the same tokens, it is the first."""
    return is_moe(config) and rank % int(config.parallel_config.tensor_parallel_size) == 0


def _by_rank(layer: Layer, counts: Sequence[int], place: int, table: Any) -> list[int] | None:
    """Tokens of each rank's experts; None where it is not known which those are."""
    placement, counts = layer.placement, counts[: layer.experts]
    if placement is None:
        return None
    if placement.rank_of is not None:
        return expert_ranks.by_rank(counts, placement.rank_of, placement.ranks)
    if table is None:
        return None
    return expert_ranks.by_rank_of_copies(counts, table[place].tolist(), placement.ranks)


class Counted:
    """What counts a worker's experts: ``experts``, None until it does."""

    experts: Experts | None = None

    def close(self) -> None:
        """The worker is gone."""
        if self.experts is None:
            return
        try:
            self.experts.read_all()
        except Exception as error:
            self.experts.part.fail("the worker's end", error)


def watch(worker: Any, graphs: Graphs, most_pairs: int, counted: Counted) -> None:
    """Begin to count as soon as this worker has its model.

    Args:
        worker: vLLM's.
        graphs: with the worker's recorder.
        most_pairs: count pairs where a layer has no more experts than this.
        counted: gets what counts.

    Raises:
        AttributeError: it has no method to load its model.

    """
    this = reference(worker)

    def after(_: Any, *__: Any) -> None:
        undo()
        try:
            problem = begin(this(), graphs, most_pairs, counted)
        except UncountableError as error:
            problem = str(error)
        except Exception as error:
            problem = cause(error)
        if problem is not None:
            _lose(graphs, problem)

    undo = hook(worker, "load_model", after=after)


def begin(worker: Any, graphs: Graphs, most_pairs: int, counted: Counted) -> str | None:
    """Begin to count with a worker that has its model; returns why that cannot be."""
    config, runner = worker.vllm_config, worker.model_runner
    problem = why_not(config, worker.device.type)
    if problem is not None:
        return problem
    layers = find(runner.get_model() if has_method(runner, "get_model") else runner.model)
    if not layers:
        return "its model has no router that profilemate knows"
    experts = max(layer.experts for layer in layers)
    counts = Counts(
        sys.modules["torch"],
        worker.device,
        layers,
        _most_tokens(config),
        experts <= most_pairs,
    )
    is_moving = any(layer.placement and layer.placement.rank_of is None for layer in layers)
    # Neither the runner nor, through its layers' routers, the model is to be kept alive.
    this, count = reference(runner), len(layers)

    def table() -> Any:
        return expert_ranks.moving(this(), count) if is_moving else None

    recorded = Experts(graphs, engine_rank(config), layers, counts, table)
    with recorded.part.attaching():
        for place, layer in enumerate(layers):
            recorded.part.on_stop(hook(layer.router, METHOD, after=recorded.chosen_by(place)))
        serving.watch(worker, runner, recorded.part, recorded.executed)
    graphs.recorder.status(
        experts={
            "layers": [layer.number for layer in layers],
            "experts": experts,
            "chosen": max(layer.chosen for layer in layers),
            "pairs": counts.of_pairs is not None,
            "ranks": max((each.placement.ranks for each in layers if each.placement), default=None),
            "eplb": is_moving,
            "problem": None,
        }
    )
    counted.experts = recorded
    return None


def _most_tokens(config: Any) -> int:
    """Rows of a batch that can hold tokens."""
    captured = getattr(config.compilation_config, "max_cudagraph_capture_size", None) or 0
    return max(int(config.scheduler_config.max_num_batched_tokens), int(captured))


def _lose(graphs: Graphs, problem: str) -> None:
    graphs.recorder.status(experts={"problem": problem})
    say(
        f"{graphs.recorder.name}: experts are not counted: {problem}; "
        "vLLM goes on, and the rest is recorded"
    )
