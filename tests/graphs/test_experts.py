# SPDX-License-Identifier: Apache-2.0
"""Which experts are counted: what vLLM's routers chose for requests, and nothing else.

Routers, MoE layers and the forward context are vLLM's. The runner pads batches as for a CUDA graph.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from profilemate.collector.decode import Shape, episodes
from profilemate.collector.journal_reader import JournalReader
from profilemate.format.events import More, Op
from profilemate.format.journal import Kind
from profilemate.hooks.gpu import expert_counts, experts
from profilemate.hooks.gpu.expert_layers import find, why_not
from profilemate.hooks.gpu.graphs import Graphs
from profilemate.record.recorder import Recorder

EXPERTS, CHOSEN, LAYERS = 10, 3, 2
PADDED = 16
"""Rows of each batch, whatever it has in it."""


class Toy:
    """A worker, its runner and its model in one, of MoE layers on a CPU.

    ``chosen`` has what was chosen for requests, by layer: a row for each token.
    """

    def __init__(self, *, unasked: bool = False, **parallel: Any) -> None:
        import torch
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.router.router_factory import (
            create_fused_moe_router,
        )

        class ToyLayer(MoERunner):  # type: ignore[misc]
            def __init__(self, number: int) -> None:
                torch.nn.Module.__init__(self)
                self.router = create_fused_moe_router(top_k=CHOSEN, global_num_experts=EXPERTS)
                self.layer_name = f"model.layers.{number}.mlp.experts"
                self.moe_config = SimpleNamespace(num_logical_experts=EXPERTS)

        self.model_runner = self
        self.device = torch.device("cpu")
        self.model = torch.nn.ModuleList([ToyLayer(number) for number in range(LAYERS)])
        self.random = random.Random(0)
        self.generator = torch.Generator().manual_seed(0)
        self.chosen: list[list[list[int]]] = [[] for _ in range(LAYERS)]
        self.unasked = unasked
        self.dp_tokens: Sequence[int] | None = None
        self.more_rows = 0
        self.rank = 0
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_rank=0, **parallel),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=PADDED),
            compilation_config=SimpleNamespace(mode=0, max_cudagraph_capture_size=0),
            model_config=None,
        )

    def get_model(self) -> Any:
        return self.model

    def load_model(self) -> None:
        """Load nothing."""

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> str:
        """Run a step."""
        self._forward(scheduler_output.total_num_scheduled_tokens, is_served=True)
        return "output"

    def _dummy_run(self, num_tokens: int) -> None:
        self._forward(num_tokens)

    def compile_or_warm_up_model(self) -> None:
        """Warm up with requests that nobody made."""
        self._dummy_run(PADDED)
        self.execute_model(step(5))
        for rows in self.chosen:
            rows.clear()

    def _forward(self, tokens: int, *, is_served: bool = False) -> None:
        import torch
        from vllm import forward_context

        metadata = None
        rows, first = PADDED, 0
        if self.dp_tokens is not None:
            counts = torch.tensor(self.dp_tokens)
            metadata = SimpleNamespace(num_tokens_across_dp_cpu=counts, local_sizes=None)
            rank = self.vllm_config.parallel_config.data_parallel_rank
            rows, first = sum(self.dp_tokens) + self.more_rows, sum(self.dp_tokens[:rank])
        context = SimpleNamespace(dp_metadata=metadata)
        with forward_context.override_forward_context(context), torch.inference_mode():
            for number, layer in enumerate(self.model):
                logits = torch.randn(rows, EXPERTS, generator=self.generator)
                if self.unasked and number:
                    continue
                _, ids = layer.router.select_experts(logits, logits)
                assert ids.shape == (rows, CHOSEN)
                if is_served:
                    best = np.argsort(-logits.numpy(), axis=1)[:, :CHOSEN]
                    self.chosen[number] += best[first : first + tokens].tolist()


def step(tokens: int) -> Any:
    return SimpleNamespace(total_num_scheduled_tokens=tokens)


class Recorded:
    """A toy whose experts are recorded."""

    def __init__(self, toy: Toy, path: Path, most_pairs: int = 512) -> None:
        self.toy = toy
        self.path = path
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self.recorder = Recorder(fd, {"producer": "worker", "rank": 0}, "worker 0", path=path)
        self.counted = experts.Counted()
        self.graphs = Graphs(self.recorder, None)
        experts.watch(toy, self.graphs, most_pairs, self.counted)
        toy.load_model()

    def end(self) -> None:
        """The worker is gone."""
        self.counted.close()
        self.recorder.close()

    def events(self, kind: More) -> list[Any]:
        """The values of the events of this kind."""
        found = []
        for frame in JournalReader(self.path).read():
            if frame.kind == Kind.EVENTS:
                for episode in episodes(frame.payload, Shape(0, 0), lambda _: []):
                    for op, event in zip(episode.ops, episode.events, strict=True):
                        if op == Op.MORE and event[1] == kind:
                            found.append(json.loads(event[2]))
        return found

    def status(self) -> dict[str, Any]:
        """All that the journal says of itself."""
        known: dict[str, Any] = {}
        for frame in JournalReader(self.path).read():
            if frame.kind in (Kind.STATUS, Kind.END):
                known |= json.loads(frame.payload)
        return known

    def counts(self) -> list[list[int]]:
        """The tokens of each layer's experts, of all events."""
        sums = [[0] * EXPERTS for _ in range(LAYERS)]
        for _, _, layers in self.events(More.EXPERTS):
            for number, counts, _ in layers:
                for expert, count in enumerate(counts):
                    sums[number][expert] += count
        return sums


@pytest.fixture
def recorded(groups: None, tmp_path: Path) -> Iterator[Recorded]:
    found = Recorded(Toy(), tmp_path / "worker0.journal")
    yield found
    found.recorder.close()


def expected(toy: Toy) -> list[list[int]]:
    counters = [Counter(itertools.chain.from_iterable(rows)) for rows in toy.chosen]
    return [[counter[expert] for expert in range(EXPERTS)] for counter in counters]


def test_requests_count_and_padding_does_not(recorded: Recorded) -> None:
    toy = recorded.toy
    for tokens in (16, 1, 7, 0, 3):
        assert toy.execute_model(step(tokens)) == "output"
    recorded.end()
    assert recorded.counts() == expected(toy)
    assert sum(map(sum, expected(toy))) == 27 * CHOSEN * LAYERS
    assert sum(tokens for _, tokens, _ in recorded.events(More.EXPERTS)) == 27


def test_what_serves_nobody_does_not_count(recorded: Recorded) -> None:
    toy = recorded.toy
    toy.compile_or_warm_up_model()
    toy.execute_model(step(4))
    toy._dummy_run(9)
    toy.execute_model(step(2))
    recorded.end()
    assert recorded.counts() == expected(toy)
    assert sum(tokens for _, tokens, _ in recorded.events(More.EXPERTS)) == 6


def test_a_dummy_around_an_execution_and_one_in_it(recorded: Recorded) -> None:
    toy = recorded.toy
    kind = type(toy)
    plain = kind.execute_model

    class Around(kind):  # type: ignore[misc, valid-type]
        def _dummy_run(self, num_tokens: int) -> None:
            self.execute_model(step(num_tokens))

    class Within(kind):  # type: ignore[misc, valid-type]
        def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> str:
            self._dummy_run(1)
            return plain(self, scheduler_output)

    for changed in (Around(), Within()):
        found = Recorded(changed, recorded.path.with_name(f"{type(changed).__name__}.journal"))
        changed._dummy_run(5)
        if isinstance(changed, Within):
            changed.execute_model(step(3))
        found.end()
        assert found.events(More.EXPERTS) == []


@pytest.mark.parametrize("at_once", [expert_counts.MOST_AT_ONCE, 20])
def test_pairs(groups: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Those farthest above chance, where not all are reported, whatever is counted at once."""
    monkeypatch.setattr(expert_counts, "MOST_AT_ONCE", at_once)
    recorded = Recorded(Toy(), tmp_path / "worker0.journal")
    toy = recorded.toy
    for tokens in (16, 5, 16, 9, 16, 16):
        toy.execute_model(step(tokens))
    recorded.end()
    (event,) = recorded.events(More.EXPERT_PAIRS)
    routed, pairs = event
    assert routed == 78
    for number in range(LAYERS):
        together = np.zeros((EXPERTS, EXPERTS))
        for row in toy.chosen[number]:
            for one, other in itertools.permutations(row, 2):
                together[one, other] += 1
        by_chance = quasi_independent(together)
        np.fill_diagonal(by_chance, 1)
        beyond = (together - by_chance) / np.sqrt(by_chance)
        all_pairs = [pair for pair in itertools.combinations(range(EXPERTS), 2) if together[pair]]
        highest = sorted((float(beyond[pair]) for pair in all_pairs), reverse=True)
        found = [pair for pair in pairs if pair[0] == number]
        # By their values: two pairs may be as far from chance.
        found_beyond = [float(beyond[one, other]) for _, one, other, *_ in found]
        assert len({(one, other) for _, one, other, *_ in found}) == len(found)
        assert found_beyond == pytest.approx(highest[: expert_counts.PAIRS_OF_A_LAYER])
        assert len(found) < len(all_pairs)
        counts = expected(toy)[number]
        for _, one, other, both, chance, of_one, of_other in found:
            assert both == together[one, other]
            assert chance == pytest.approx(by_chance[one, other], rel=1e-3)
            assert (of_one, of_other) == (counts[one], counts[other])


def quasi_independent(together: np.ndarray) -> np.ndarray:
    """The table without a diagonal that has these sums and no other structure, by iterative
    proportional fitting."""
    fitted = 1 - np.eye(len(together))
    for _ in range(500):
        fitted *= (together.sum(1) / fitted.sum(1))[:, None]
        fitted *= (together.sum(0) / fitted.sum(0))[None, :]
    return fitted


def test_pairs_are_left_out_where_experts_are_many(groups: None, tmp_path: Path) -> None:
    recorded = Recorded(Toy(), tmp_path / "worker0.journal", most_pairs=EXPERTS - 1)
    recorded.toy.execute_model(step(8))
    recorded.end()
    assert recorded.events(More.EXPERT_PAIRS) == []
    assert recorded.counts() == expected(recorded.toy)
    assert recorded.status()["experts"]["pairs"] is False


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_counts_its_own_tokens(groups: None, tmp_path: Path, rank: int) -> None:
    """As where the tokens of all data-parallel ranks are gathered before they are routed."""
    toy = Toy()
    toy.vllm_config.parallel_config.data_parallel_rank = rank
    recorded = Recorded(toy, tmp_path / "worker0.journal")
    toy.dp_tokens = (4, 9, 6)
    toy.execute_model(step(4))
    toy.execute_model(step(2))
    recorded.end()
    assert recorded.counts() == expected(toy)
    assert sum(map(sum, expected(toy))) == 6 * CHOSEN * LAYERS


def test_rows_that_may_be_of_any_rank_end_the_counting(
    recorded: Recorded, capfd: pytest.CaptureFixture[str]
) -> None:
    toy = recorded.toy
    toy.execute_model(step(3))
    toy.dp_tokens = (4, 9, 6)
    toy.more_rows = 1
    assert toy.execute_model(step(3)) == "output"
    assert toy.execute_model(step(3)) == "output"
    recorded.end()
    assert recorded.status()["lost"]["experts"]["tables"] == "moe_experts.csv and moe_pairs.csv"
    reason = "20 rows are routed where ranks have [4, 9, 6]"
    assert reason in recorded.status()["lost"]["experts"]["reason"]
    (line,) = capfd.readouterr().err.splitlines()
    assert "no longer recorded: moe_experts.csv and moe_pairs.csv" in line
    assert reason in line


def test_a_kernel_that_routes_by_itself_ends_the_counting(groups: None, tmp_path: Path) -> None:
    recorded = Recorded(Toy(unasked=True), tmp_path / "worker0.journal")
    assert recorded.toy.execute_model(step(3)) == "output"
    assert recorded.toy.execute_model(step(3)) == "output"
    recorded.end()
    reason = recorded.status()["lost"]["experts"]["reason"]
    assert "the routers of 1 of 2 MoE layers are not asked: a kernel routes by itself" in reason
    assert recorded.events(More.EXPERTS) == []


def test_a_pause(recorded: Recorded) -> None:
    toy = recorded.toy
    toy.execute_model(step(4))
    before = expected(toy)
    recorded.recorder.wants_pause = True
    toy.execute_model(step(5))
    toy.execute_model(step(5))
    recorded.recorder.wants_pause = False
    toy.execute_model(step(6))  # in which it goes on
    for rows in toy.chosen:
        rows.clear()
    toy.execute_model(step(7))
    recorded.end()
    sums = [np.add(one, other).tolist() for one, other in zip(before, expected(toy), strict=True)]
    assert recorded.counts() == sums


def test_rows_come_in_time(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10**12]
    monkeypatch.setattr(experts, "_now", lambda: now[0])
    toy = recorded.toy
    for _ in range(5):
        toy.execute_model(step(1))
        now[0] += 400_000_000
    recorded.end()
    found = recorded.events(More.EXPERTS)
    # At 1.2 s, and at the end; no token is in two of them.
    assert [tokens for _, tokens, _ in found] == [4, 1]
    assert found[1][0] == 10**12 + 1_200_000_000
    assert recorded.counts() == expected(toy)


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({"use_ubatching": True}, "cuda", "dual batch overlap"),
        ({"use_sequence_parallel_moe": True}, "cuda", "sequence parallelism"),
        ({"prefill_context_parallel_size": 2}, "cuda", "prefill context parallelism"),
        ({"mode": 3}, "cpu", "--enforce-eager"),
        ({"mode": 3}, "cuda", None),
        ({}, "cpu", None),
    ],
)
def test_why_not(changes: dict[str, Any], device: str, reason: str | None) -> None:
    mode = SimpleNamespace(mode=changes.get("mode", 0))
    config = SimpleNamespace(parallel_config=SimpleNamespace(**changes), compilation_config=mode)
    found = why_not(config, device)
    assert found is None if reason is None else reason in str(found)


def test_a_problem_is_said_once_and_vllm_goes_on(
    groups: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recorded = Recorded(Toy(use_ubatching=True), tmp_path / "worker0.journal")
    assert recorded.toy.execute_model(step(3)) == "output"
    recorded.end()
    assert "dual batch overlap" in recorded.status()["experts"]["problem"]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("profilemate: worker 0: experts are not counted: vLLM divides a batch")


def test_layers_have_the_numbers_of_their_names(recorded: Recorded) -> None:
    """As in the releases from 0.20 to 0.23, whose runners know no number; and with none at all."""
    first, second = recorded.toy.model

    class Nameless(type(first)):  # type: ignore[misc]
        @property
        def layer_id(self) -> int:
            raise AttributeError("layer_id")

    for layer in (first, second):
        layer.__class__ = Nameless
    first.layer_name, second.layer_name = "model.layers.1.mlp.experts", "model.layers.4.mlp.experts"
    assert [layer.number for layer in find(recorded.toy.model)] == [1, 4]
    first.layer_name = second.layer_name = "experts"
    assert [layer.number for layer in find(recorded.toy.model)] == [0, 1]


def test_the_model_goes_with_its_worker(recorded: Recorded) -> None:
    import weakref

    gone = weakref.ref(recorded.toy.model[0].router)
    recorded.toy.execute_model(step(3))
    wanted = expected(recorded.toy)
    recorded.toy = None  # type: ignore[assignment]
    gc.collect()
    assert gone() is None
    recorded.end()
    assert recorded.counts() == wanted
