# SPDX-License-Identifier: Apache-2.0
"""Which configurations are tried, and how do they differ from the recorded one?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from analysis.errors import RuleError, SessionError
from analysis.tables.facts import Facts, Group
from analysis.whatif import groups as cache_groups
from analysis.whatif import host_memory, speculation
from analysis.whatif.host_memory import HostMemory
from analysis.whatif.prefixes import LONGEST, UNIT, Prefixes
from analysis.whatif.speculation import Speculation
from analysis.whatif.users import EACH
from analysis.whatif.workload import Workload

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 8192
"""vLLM's own defaults, for a trace, and for a session that does not have the setting."""

POLICIES = ("fcfs", "priority")

MOST_COMBINATIONS = 1000

MOST = 10**9
"""Larger settings are refused."""

MOST_BLOCKS = 4_000_000
"""vLLM makes an object for each block of a pool: so many take half a gigabyte."""

MOST_TOKENS = 4_000_000
"""A request's tokens, of which vLLM makes lists: so many take as much."""


@dataclass(frozen=True)
class Configuration:
    """The settings of a simulated engine, by vLLM's names.

    ``label``: what differs from the recorded ones, in a few words. ``num_blocks``: usable blocks of
    an engine's pool, without the null block. ``policy``: the order in which requests are scheduled.
    ``max_num_active_seqs`` and ``max_num_scheduled_tokens``: None where they follow from
    ``max_num_seqs`` and ``max_num_batched_tokens``. vLLM chooses other settings that are None.
    ``batches``: steps in flight at once.

    ``groups``: the KV cache groups; none stand for one group of full attention.
    ``hash_block_size``: tokens of what their blocks' contents are known by; None: a block's.
    ``retention_interval`` and ``shares_checkpoints``: as ``analysis.tables.facts.Retention``.
    ``users``: of a closed loop; None for an open one (``profilemate.simulation.coming``).
    ``speculation``: None without drafts. ``host``: a second tier in host memory, None without one.
    ``block_bytes``: what a block takes on each GPU, None where not known; ``gpus``: on how many the
    blocks of an engine differ.
    """

    label: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    policy: str
    chunked_prefill: bool
    max_model_len: int
    async_scheduling: bool = False
    batches: int = 1
    max_num_active_seqs: int | None = None
    max_num_scheduled_tokens: int | None = None
    scheduler_reserve_full_isl: bool | None = None
    watermark: float | None = None
    long_prefill_token_threshold: int | None = None
    groups: tuple[Group, ...] = ()
    hash_block_size: int | None = None
    retention_interval: int | None = None
    shares_checkpoints: bool = False
    users: int | None = None
    speculation: Speculation | None = None
    host: HostMemory | None = None
    block_bytes: int | None = None
    gpus: int = 1

    @property
    def gpu_blocks(self) -> int:
        """Blocks of the pool with the null block, as ``--num-gpu-blocks-override`` takes them."""
        return self.num_blocks + 1


@dataclass(frozen=True)
class Pool:
    """The size of a pool that a user asks for: a ``factor`` of the recorded memory, or ``blocks``,
    the null block included, as vLLM counts them."""

    factor: float | None = None
    blocks: int | None = None

    @property
    def label(self) -> str:
        return f"{self.factor:g}x blocks" if self.blocks is None else f"{self.blocks:,} blocks"

    def usable(self, base: Configuration, block_size: int) -> int:
        """Usable blocks of a pool of this size."""
        if self.blocks is not None:
            return self.blocks - 1
        return round((self.factor or 0) * base.gpu_blocks * base.block_size / block_size) - 1


@dataclass(frozen=True)
class Choices:
    """The values to try of each setting, in all combinations; an empty setting stays as recorded.

    Without ``blocks`` the pool keeps its memory, whatever the block size. ``host_gib``, 0 for none,
    and ``host_bandwidth`` in GB/s are as ``analysis.whatif.host_memory`` has them, ``host_chunk``
    in tokens. ``token_bytes``: of KV cache on each GPU, for a trace.
    """

    blocks: tuple[Pool, ...] = ()
    block_size: tuple[int, ...] = ()
    max_num_seqs: tuple[int, ...] = ()
    max_num_batched_tokens: tuple[int, ...] = ()
    prefix_caching: tuple[bool, ...] = ()
    policy: tuple[str, ...] = ()
    chunked_prefill: tuple[bool, ...] = ()
    retention_interval: tuple[int | None, ...] = ()
    users: tuple[int | None, ...] = ()
    host_gib: tuple[float, ...] = ()
    host_chunk: tuple[int, ...] = ()
    host_bandwidth: tuple[float, ...] = ()
    token_bytes: int | None = None

    @property
    def hosts(self) -> tuple[tuple[float | None, int | None, float | None], ...]:
        """Combinations of size, chunk and bandwidth; None stays as it is."""
        return tuple(
            product(
                self.host_gib or (None,), self.host_chunk or (None,), self.host_bandwidth or (None,)
            )
        )


def pools(text: str) -> tuple[Pool, ...]:
    """The sizes in a text.

    >>> pools("0.5x,4000")
    (Pool(factor=0.5, blocks=None), Pool(factor=None, blocks=4000))

    Raises:
        RuleError: it is no such list.

    """
    return tuple(_pool(part) for part in _listed(text))


def _pool(text: str) -> Pool:
    if re.fullmatch(r"(\d{1,4}\.?\d{0,6}|\.\d{1,6}) ?x", text, re.ASCII):
        factor = float(text.rstrip("x "))
        if 0.01 <= factor <= 1000:
            return Pool(factor=factor)
    elif re.fullmatch(r"\d{1,10}", text, re.ASCII) and 2 <= int(text) <= MOST:
        return Pool(blocks=int(text))
    raise RuleError(
        f"{text!r} is no size of a pool; write blocks as vLLM counts them, from 2 on (4000), or a "
        "factor of the recorded pool, from 0.01x to 1000x (0.5x)"
    )


def numbers(text: str) -> tuple[int, ...]:
    """The whole numbers from 1 on in a text.

    Raises:
        RuleError: it is no such list.

    """
    found = _listed(text)
    for part in found:
        if not re.fullmatch(r"\d{1,10}", part, re.ASCII) or not 1 <= int(part) <= MOST:
            raise RuleError(f"{part!r} is no number from 1 to {MOST:,}")
    return tuple(map(int, found))


def one_number(text: str) -> int:
    """The whole number from 1 on in a text.

    Raises:
        RuleError: it is none, or there are several.

    """
    found = numbers(text)
    if len(found) > 1:
        raise RuleError("give one number")
    return found[0]


def users(text: str) -> tuple[int, ...]:
    """The numbers of users in a text; ``EACH`` for ``each``.

    Raises:
        RuleError: it is no such list.

    """
    found = []
    for part in _listed(text):
        if part.lower() != "each" and not re.fullmatch(r"\d{1,7}", part, re.ASCII):
            raise RuleError(f"{part!r} is no number of users; write 8, or each")
        count = EACH if part.lower() == "each" else int(part)
        if part.lower() != "each" and not count:
            raise RuleError("0 users send nothing; write 8, or each")
        found.append(count)
    return tuple(found)


DENSE = "dense"


def intervals(text: str) -> tuple[int | None, ...]:
    """The retention intervals in a text: tokens, 0 included; None for ``dense``.

    Raises:
        RuleError: it is no such list.

    """
    found: list[int | None] = []
    for part in _listed(text):
        if part.lower() == DENSE:
            found.append(None)
        elif re.fullmatch(r"\d{1,10}", part, re.ASCII) and int(part) <= MOST:
            found.append(int(part))
        else:
            raise RuleError(f"{part!r} is no number from 0 to {MOST:,}, and not {DENSE}")
    return tuple(found)


def switches(text: str) -> tuple[bool, ...]:
    """The switches in a text: true for ``on``, false for ``off``.

    Raises:
        RuleError: it is no such list.

    """
    return tuple(word == "on" for word in words(text, ("on", "off")))


def words(text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """The words in a text, all of them ``allowed``.

    Raises:
        RuleError: the text has another word.

    """
    found = tuple(part.lower() for part in _listed(text))
    for part in found:
        if part not in allowed:
            raise RuleError(f"{part!r} is none of {', '.join(allowed)}")
    return found


def _listed(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def recorded(workload: Workload, choices: Choices) -> tuple[Configuration, tuple[str, ...]]:
    """The configuration that the session ran with, and a line for each thing that the simulation
    does otherwise or has to guess.

    A trace has none: then it is vLLM's defaults with the first pool of the choices, which the
    settings without a choice and factors of the pool go by.

    Raises:
        SessionError: the session cannot be simulated.

    """
    longest = int((workload.input_tokens + workload.output_tokens).max()) + 1
    if longest > MOST_TOKENS:
        raise SessionError(
            f"{workload.name}: a request has {longest - 1:,} tokens, and fewer than "
            f"{MOST_TOKENS:,} can be simulated; leave that request out"
        )
    if workload.measured is None:
        base = _of_trace(choices, longest, has_contents=workload.has_contents)
        return base, workload.notes
    facts = workload.measured.facts
    _refuse(workload, facts)
    groups = cache_groups.of_session(workload.name, facts)
    settings = facts.scheduler
    size = cache_groups.block_size(groups) if groups else workload.measured.block_size or 0
    block_bytes = choices.token_bytes * size if choices.token_bytes else facts.bytes_per_block
    host = host_memory.of_session(facts, block_bytes)
    if host is not None and choices.host_bandwidth:
        host = replace(host, bytes_per_sec=choices.host_bandwidth[0] * 1e9)
    is_tried = any(choices.host_gib)
    notes = [
        *workload.notes,
        *_notes(facts),
        *host_memory.notes(facts, host, is_tried=is_tried),
        *cache_groups.notes(facts, groups),
    ]
    seqs = _or_default(settings.max_num_seqs, "max_num_seqs", MAX_NUM_SEQS, notes)
    tokens = _or_default(
        settings.max_num_batched_tokens, "max_num_batched_tokens", MAX_NUM_BATCHED_TOKENS, notes
    )
    return Configuration(
        label="as recorded",
        num_blocks=workload.measured.num_blocks or 0,
        block_size=size,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        prefix_caching=_or_default(facts.prefix_caching, "prefix_caching", True, notes),
        policy=_or_default(settings.policy, "policy", "fcfs", notes),
        chunked_prefill=_or_default(settings.chunked_prefill, "chunked_prefill", True, notes),
        max_model_len=max(
            _or_default(facts.max_model_len, "max_model_len", longest, notes), longest
        ),
        async_scheduling=settings.async_scheduling is True,
        batches=facts.batches,
        max_num_active_seqs=_unlike(settings.max_num_active_seqs, seqs),
        max_num_scheduled_tokens=_unlike(settings.max_num_scheduled_tokens, tokens),
        scheduler_reserve_full_isl=settings.scheduler_reserve_full_isl,
        watermark=settings.watermark,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        speculation=speculation.of_session(facts),
        groups=groups,
        hash_block_size=workload.block_size if groups else None,
        retention_interval=facts.retention.interval if groups and facts.retention else None,
        shares_checkpoints=bool(groups and facts.retention and facts.retention.shares_checkpoints),
        host=host,
        block_bytes=block_bytes,
        gpus=host_memory.copies(facts),
    ), tuple(notes)


def _of_trace(choices: Choices, longest: int, *, has_contents: bool) -> Configuration:
    sizes = [pool.blocks for pool in choices.blocks if pool.blocks is not None]
    if not sizes:
        raise RuleError(
            "a trace has no pool whose size could be kept or multiplied; name the pool, in "
            "blocks as vLLM counts them: --blocks 4000"
        )
    if sizes[0] > MOST_BLOCKS:
        raise RuleError(
            f"--blocks {sizes[0]:,}: at most {MOST_BLOCKS:,} can be simulated; the fast engine "
            "(--fast) models more"
        )
    size = (*choices.block_size, BLOCK_SIZE)[0]
    return Configuration(
        label="vLLM's defaults",
        num_blocks=sizes[0] - 1,
        block_size=size,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        prefix_caching=has_contents,
        policy="fcfs",
        chunked_prefill=True,
        max_model_len=longest,
        block_bytes=choices.token_bytes and choices.token_bytes * size,
    )


def _refuse(workload: Workload, facts: Facts) -> None:
    measured = workload.measured
    if measured is None or not measured.num_blocks or not measured.block_size:
        raise SessionError(
            f"{workload.name}: metadata.json does not say how large the pool and its blocks "
            "were, so there is no configuration to simulate"
        )
    if measured.num_blocks > MOST_BLOCKS:
        raise SessionError(
            f"{workload.name}: metadata.json has a pool of {measured.num_blocks:,} blocks, and at "
            f"most {MOST_BLOCKS:,} can be simulated; the fast engine (--fast) models it"
        )


def _notes(facts: Facts) -> Iterator[str]:
    settings = facts.scheduler
    yield from speculation.notes(facts)
    if settings.max_loras:
        yield f"the limit of {settings.max_loras} adapters in a step is not simulated"
    if settings.async_scheduling is None:
        yield "whether scheduling was asynchronous is not recorded; simulated as if it was not"


def goes_into_blocks(workload: Workload, tried: Iterable[Configuration]) -> bool:
    """Whether blocks of a configuration end inside recorded blocks."""
    return any(one.block_size % workload.block_size for one in tried)


def doubts(
    workload: Workload, tried: Iterable[Configuration], prefixes: Prefixes | None
) -> Iterator[str]:
    """A line for each block size for which the recorded contents are not known well enough."""
    size = workload.block_size
    others = {one.block_size for one in tried if one.block_size != size}
    if any(one.groups for one in tried) and not workload.drops.is_reset.all():
        yield "evictions on request are left out, as which group's block went is not known"
    elif others and not workload.drops.is_reset.all():
        shown = ", ".join(f"{other:,}" for other in sorted(others))
        yield (
            f"block size {shown}: evictions on request are left out, as they are known by blocks "
            f"of {size:,} tokens"
        )
    if len(workload.drops) and any(one.host for one in tried):
        yield (
            "resets and evictions on request empty the pool alone: whether they emptied host "
            "memory, too, is not recorded"
        )
    for other in sorted({one.block_size for one in tried if one.block_size % size}):
        by_prefixes = prefixes is not None and size % UNIT == 0 and other % UNIT == 0
        beyond = f" beyond their first {LONGEST:,} tokens" if by_prefixes else ""
        if workload.has_contents:
            yield (
                f"block size {other:,}: what prompts share of less than the {size:,} tokens of a "
                f"recorded block is not known{beyond}, so its hit rate is a lower bound"
            )


def _or_default(value: Any, name: str, otherwise: Any, notes: list[str]) -> Any:
    """The value, or what stands in for a missing one, with a note of that."""
    if value is not None:
        return value
    shown = ("off", "on")[otherwise] if isinstance(otherwise, bool) else otherwise
    notes.append(f"{name} is not recorded; simulated with {shown}")
    return otherwise


def _unlike(value: int | None, other: int) -> int | None:
    return None if value == other else value


def configurations(
    base: Configuration, choices: Choices, *, has_contents: bool, is_recorded: bool = True
) -> tuple[Configuration, ...]:
    """Every combination of the choices except the base itself, where that was recorded.

    Args:
        base: the values of settings without a choice.
        choices: the values to try.
        has_contents: whether the contents of the requests are known.
        is_recorded: a session ran with the base; of a trace's, only what was asked for is tried.

    Raises:
        RuleError: a combination makes no sense, or there are too many.

    """
    if not has_contents and not base.prefix_caching and True in choices.prefix_caching:
        raise RuleError(
            "prefix caching was off when this was recorded, or it is a trace without contents: "
            "what prompts share is not known, so prefix caching cannot be tried"
        )
    values = (
        choices.blocks or (Pool(factor=1.0),),
        choices.block_size or (base.block_size,),
        choices.max_num_seqs or (base.max_num_seqs,),
        choices.max_num_batched_tokens or (base.max_num_batched_tokens,),
        choices.prefix_caching or (base.prefix_caching,),
        choices.policy or (base.policy,),
        choices.chunked_prefill or (base.chunked_prefill,),
        choices.retention_interval or (base.retention_interval,),
        choices.users or (base.users,),
        choices.hosts,
    )
    if base.host is None and not any(choices.host_gib):
        for option, given in (("chunk", choices.host_chunk), ("bandwidth", choices.host_bandwidth)):
            if given:
                raise RuleError(f"--host-{option}: there is no host memory; add --host-gib 8")
    if choices.retention_interval and not base.groups:
        raise RuleError(
            "--prefix-cache-retention-interval: it says which blocks of sliding windows and Mamba "
            "states stay cached, and this has no such KV cache group"
        )
    count = prod(map(len, values))
    if count > MOST_COMBINATIONS:
        raise RuleError(f"these are {count:,} combinations, and {MOST_COMBINATIONS:,} can be tried")
    found = dict.fromkeys(_changed(base, *one) for one in product(*values))
    if not is_recorded:
        return tuple(found)
    return tuple(other for other in found if replace(other, label=base.label) != base)


def _changed(
    base: Configuration,
    pool: Pool,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    prefix_caching: bool,
    policy: str,
    chunked_prefill: bool,
    retention_interval: int | None,
    users: int | None,
    hosted: tuple[float | None, int | None, float | None],
) -> Configuration:
    groups = cache_groups.resized(base.groups, block_size)
    is_resized = groups != base.groups
    usable = pool.usable(base, block_size)
    if usable < 1:
        raise RuleError(f"a pool of {pool.label} of {block_size:,} tokens has no usable block")
    if usable > MOST_BLOCKS:
        raise RuleError(
            f"a pool of {pool.label} of {block_size:,} tokens has {usable:,} blocks, and at most "
            f"{MOST_BLOCKS:,} can be simulated; the fast engine (--fast) models it"
        )
    block_bytes = base.block_bytes and round(base.block_bytes * block_size / base.block_size)
    host = host_memory.changed(
        base.host,
        gib=hosted[0],
        chunk_tokens=hosted[1],
        bandwidth=hosted[2],
        block_bytes=block_bytes,
        gpus=base.gpus,
        block_size=block_size,
    )
    changes = {
        pool.label: pool.factor != 1,
        f"block size {block_size:,}": block_size != base.block_size,
        f"{max_num_seqs:,} seqs": max_num_seqs != base.max_num_seqs,
        f"{max_num_batched_tokens:,} batched tokens": (
            max_num_batched_tokens != base.max_num_batched_tokens
        ),
        f"caching {_switch(prefix_caching)}": prefix_caching != base.prefix_caching,
        policy: policy != base.policy,
        f"chunked prefill {_switch(chunked_prefill)}": chunked_prefill != base.chunked_prefill,
        _retained(retention_interval): retention_interval != base.retention_interval,
        _by(users): users != base.users,
        host_memory.label(host, base.host, block_size): _unlike_host(base, host, block_bytes),
    }
    active, scheduled = base.max_num_active_seqs, base.max_num_scheduled_tokens
    return replace(
        base,
        label=", ".join(name for name, is_changed in changes.items() if is_changed) or base.label,
        num_blocks=usable,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_caching=prefix_caching,
        policy=policy,
        chunked_prefill=chunked_prefill,
        retention_interval=retention_interval,
        users=users,
        groups=groups,
        hash_block_size=block_size if is_resized else base.hash_block_size,
        host=host,
        block_bytes=block_bytes,
        max_num_active_seqs=active and min(active, max_num_seqs),
        max_num_scheduled_tokens=scheduled and min(scheduled, max_num_batched_tokens),
    )


def _unlike_host(base: Configuration, host: HostMemory | None, block_bytes: int | None) -> bool:
    """Whether the host memory is another one, and not only in blocks of another size."""
    same = base.host and replace(base.host, block_bytes=block_bytes or 0)
    return host != same


def _by(users: int | None) -> str:
    if users is None:
        return "open"
    return "a user each" if users == EACH else f"{users:,} user{'s' * (users > 1)}"


def _retained(interval: int | None) -> str:
    return "all blocks kept" if interval is None else f"retention interval {interval:,}"


def _switch(is_on: bool) -> str:
    return "on" if is_on else "off"
