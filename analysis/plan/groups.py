# SPDX-License-Identifier: Apache-2.0
"""Which layers share a block table, and how many bytes does a block take on each GPU?

This is the arithmetic of vLLM 0.32's ``v1/core/kv_cache_utils.py`` (``get_kv_cache_groups``,
``unify_kv_cache_spec_page_size``, ``_get_kv_cache_groups_uniform_page_size``) for caches whose
layers lie one after the other. CUDA's attention backends ask for such caches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from analysis.errors import RuleError
from analysis.plan.specs import Spec, Stage

FIXED = ("state", "cross")
"""Kinds of which a sequence holds as many blocks whatever its length."""


@dataclass(frozen=True)
class Group:
    """Layers of one kind that share a block table.

    ``kind``: ``full``, ``latent``, ``window``, ``state``, ``chunked`` (attention within chunks) or
    ``cross`` (attention to what an encoder made). ``layers``: how many, over all stages.
    ``block_size``: tokens of a block. ``page_bytes``: bytes of a block in one layer, on one GPU; a
    mean where the layers differ. ``token_bytes``: bytes of a token in one layer, 0 where the layers
    keep states. ``state_bytes``: bytes of a state. ``window``: tokens of the window or the chunk,
    None where the layers keep all tokens. ``states``: how many states a sequence holds, or how many
    blocks of what an encoder made; 0 for the other kinds.
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
        """Blocks of this group that a sequence of ``tokens`` tokens holds at most, as
        ``max_memory_usage_bytes`` and ``max_admission_blocks_per_request`` in vLLM's
        ``v1/kv_cache_interface.py`` count them. ``in_flight``: tokens that may be in flight."""
        if self.kind in FIXED:
            return self.states
        if self.window is None:
            return -(-tokens // self.block_size)
        if self.kind == "chunked":
            return -(-min(self.window + in_flight, tokens) // self.block_size)
        # A window can begin in the middle of a block, and then reaches into one block more.
        return -(-min(self.window - 1 + in_flight, tokens) // self.block_size) + 1


@dataclass(frozen=True)
class Layout:
    """The groups. ``bytes_per_block``: bytes of a block of the pool on a GPU of each stage.
    ``decided_by``: whose code made the groups."""

    groups: tuple[Group, ...]
    bytes_per_block: tuple[int, ...]
    decided_by: str

    def blocks(self, tokens: int, in_flight: int) -> int:
        """Blocks of the pool that a sequence of ``tokens`` tokens holds at most, in all groups
        together."""
        return sum(group.blocks(tokens, in_flight) for group in self.groups)


Grouping = Callable[[Sequence[Stage]], Layout]
"""A function that makes the groups of the layers of all stages."""

OURS = "profilemate"


def group(stages: Sequence[Stage]) -> Layout:
    """Make the groups by this module's arithmetic.

    Raises:
        RuleError: no layer keeps anything, or the layers' blocks cannot have the same bytes.

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
        groups=tuple(_mean([specs[name] for name in names]) for names in grouped),
        bytes_per_block=tuple(
            max(sum(specs[name].page_bytes for name in names if name in stage) for names in grouped)
            for stage in stages
        ),
        decided_by=OURS,
    )


def _mean(specs: Sequence[Spec]) -> Group:
    """The group of these layers, which may keep different amounts of a token."""
    first, count = described(specs[0], len(specs)), len(specs)
    return replace(
        first,
        page_bytes=sum(spec.page_bytes for spec in specs) // count,
        token_bytes=sum(spec.token_bytes for spec in specs) // count,
    )


def described(spec: Spec, layers: int) -> Group:
    """The group of ``layers`` layers that are all like ``spec``."""
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
    """Whether every sequence holds equally many blocks in each layer."""
    return len({(_base(spec), spec.block_size, spec.window, spec.states) for spec in specs}) == 1


def _base(spec: Spec) -> str:
    return "full" if spec.kind == "latent" else spec.kind


def _of_one_size(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """The layers with blocks of equally many bytes: smaller blocks take more tokens, or
    padding."""
    largest = max(spec.page_bytes for spec in specs.values())
    return {name: _enlarged(spec, largest) for name, spec in specs.items()}


def _enlarged(spec: Spec, size: int) -> Spec:
    """The layer with blocks of ``size`` bytes."""
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
    """The names of each group's layers: layers of one kind, in groups of about equal size."""
    alike: dict[Spec, list[str]] = defaultdict(list)
    for name, spec in specs.items():
        alike[spec].append(name)
    counts = [len(names) for names in alike.values()]
    fewest, most = min(counts), max(counts)
    # Padding a few layers costs less than having twice as many groups.
    size = most if most < fewest * 1.5 else fewest
    grouped = []
    for names in alike.values():
        count = -(-len(names) // size)
        grouped += [names[first::count] for first in range(count)]
    return grouped
