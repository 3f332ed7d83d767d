# SPDX-License-Identifier: Apache-2.0
"""Which layers share a block table, and what does a block of the pool take on each GPU?

The arithmetic of vLLM 0.32's ``v1/core/kv_cache_utils.py`` (``get_kv_cache_groups``,
``unify_kv_cache_spec_page_size``, ``_get_kv_cache_groups_uniform_page_size``) for caches whose
layers lie one after the other, which is what CUDA's attention backends ask for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from analysis.errors import RuleError
from analysis.plan.specs import Spec, Stage


@dataclass(frozen=True)
class Group:
    """Layers of one kind that share a block table.

    ``layers``: how many, over all stages. ``block_size``: in tokens. ``page_bytes``: a block of
    one of its layers, on one GPU. ``token_bytes``: of one token in one of its layers; 0 for a
    state, of which ``state_bytes`` are needed. ``window``: in tokens, None for all. ``states``:
    that a sequence holds, 0 for keys and values.
    """

    kind: str
    layers: int
    block_size: int
    page_bytes: int
    token_bytes: int
    state_bytes: int
    window: int | None
    states: int

    def blocks(self, tokens: int, in_flight: int) -> int:
        """Blocks that a sequence of this many tokens holds at most (``max_memory_usage_bytes``
        and ``max_admission_blocks_per_request`` of vLLM's ``v1/kv_cache_interface.py``)."""
        if self.kind == "state":
            return self.states
        if self.window is None:
            return -(-tokens // self.block_size)
        # The window need not begin where a block does, hence one more.
        return -(-min(self.window - 1 + in_flight, tokens) // self.block_size) + 1


@dataclass(frozen=True)
class Layout:
    """The groups, and what a block of the pool takes on a GPU of each stage of the pipeline.

    ``decided_by``: whose code made the groups.
    """

    groups: tuple[Group, ...]
    bytes_per_block: tuple[int, ...]
    decided_by: str

    def blocks(self, tokens: int, in_flight: int) -> int:
        """Blocks of the pool that a sequence of this many tokens holds at most: each group takes
        its own."""
        return sum(group.blocks(tokens, in_flight) for group in self.groups)


Grouping = Callable[[Sequence[Stage]], Layout]
"""Makes the groups of what the stages keep."""

OURS = "profilemate"


def group(stages: Sequence[Stage]) -> Layout:
    """The groups, by the arithmetic here.

    Raises:
        RuleError: the model's layers cannot be brought to one size of block.

    """
    specs = {name: spec for stage in stages for name, spec in stage.items()}
    if not specs:
        raise RuleError("no layer of this model keeps anything in the KV cache: nothing to plan")
    if _are_uniform(list(specs.values())):
        grouped = [list(specs)]
    else:
        specs = _of_one_size(specs)
        grouped = _split(specs)
    return Layout(
        groups=tuple(described(specs[names[0]], len(names)) for names in grouped),
        bytes_per_block=tuple(
            max(sum(specs[name].page_bytes for name in names if name in stage) for names in grouped)
            for stage in stages
        ),
        decided_by=OURS,
    )


def described(spec: Spec, layers: int) -> Group:
    """The group of this many layers of this kind."""
    return Group(
        kind=spec.kind,
        layers=layers,
        block_size=spec.block_size,
        page_bytes=spec.page_bytes,
        token_bytes=spec.token_bytes,
        state_bytes=spec.state_bytes,
        window=spec.window,
        states=spec.states,
    )


def _are_uniform(specs: Sequence[Spec]) -> bool:
    """Whether all layers need the same blocks of every sequence."""
    return len({(_base(spec), spec.block_size, spec.window, spec.states) for spec in specs}) == 1


def _base(spec: Spec) -> str:
    return "full" if spec.kind == "latent" else spec.kind


def _of_one_size(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """The same with blocks of as many bytes each: smaller ones take more tokens, or are padded."""
    largest = max(spec.page_bytes for spec in specs.values())
    return {name: _enlarged(spec, largest) for name, spec in specs.items()}


def _enlarged(spec: Spec, size: int) -> Spec:
    if spec.page_bytes == size:
        return spec
    if spec.kind == "state":
        return replace(spec, padded_bytes=size)
    if size % spec.page_bytes == 0:
        return replace(spec, block_size=spec.block_size * (size // spec.page_bytes))
    if spec.kind == "latent":
        raise RuleError(
            "blocks of latent attention cannot be brought to the size of the other layers'; "
            "choose another --block-size"
        )
    return replace(spec, padded_bytes=size)


def _split(specs: Mapping[str, Spec]) -> list[list[str]]:
    """The layers of each group: those of a kind, in parts of about as many layers each."""
    alike: dict[Spec, list[str]] = defaultdict(list)
    for name, spec in specs.items():
        alike[spec].append(name)
    counts = [len(names) for names in alike.values()]
    fewest, most = min(counts), max(counts)
    # A few layers of padding cost less than twice the groups.
    size = most if most < fewest * 1.5 else fewest
    grouped = []
    for names in alike.values():
        parts = -(-len(names) // size)
        grouped += [names[part::parts] for part in range(parts)]
    return grouped
