# SPDX-License-Identifier: Apache-2.0
"""The JSON of a journal, checked: what its writer is and what changed about it.

What is not of the type that the writer gives it was damaged, or is of another release. It is
refused here, once, so that nobody else has to look.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from profilemate.collector.decode import DecodeError, Shape
from profilemate.format.events import MAX_POOLS

MAX_BLOCKS = 1 << 25
"""Of all pools of an engine together: 1 KiB each on a GPU of 32 GiB. A block takes 24 bytes
here."""

MAX_GROUPS = 1 << 10
MAX_RANK = 1 << 20
MAX_LAYERS = 1 << 16
MAX_TOKENS = 1 << 24

_MAX_NUMBER = 1 << 53
"""What JSON numbers hold exactly."""

_MAX_DEPTH = 16
_MAX_SHOWN = 40

Check = Callable[[Any], bool]


@dataclass(frozen=True)
class PoolFacts:
    """A pool as vLLM made it. ``usage_blocks`` is what vLLM divides by where it says how full the
    pool is."""

    blocks: int
    null: int | None
    usage_blocks: int


@dataclass(frozen=True)
class Header:
    """What a journal begins with.

    Attributes:
        facts: all of it, as metadata.json passes it on.
        role: ``engine`` or ``worker``.
        rank: its place among the producers of its kind.
        pid: the process.
        start: when that process started, as ``profilemate.format.processes`` knows it.
        since: the time that the first events frame gives for the frame before it; None in journals
            that do not say.
        pools: of an engine; a worker has none.
        group_pools: the pool of each KV cache group.
        caching: whether blocks have contents.
        hash_block_size: tokens that one content id stands for.
        prefix_unit: prefixes that end at a multiple of this many tokens have ids of contents; 0:
            none have.
        max_tokens: no request has more.
        gpu_timing: whether replays are measured on the GPU.

    """

    facts: dict[str, Any]
    role: str
    rank: int
    pid: int
    start: str
    since: int | None
    pools: tuple[PoolFacts, ...]
    group_pools: tuple[int, ...]
    caching: bool
    hash_block_size: int
    prefix_unit: int
    max_tokens: int
    gpu_timing: bool

    @property
    def shape(self) -> Shape:
        """How many pools and groups there are."""
        return Shape(len(self.pools), len(self.group_pools))


def read_header(payload: bytes) -> Header:
    """The header in a frame.

    Raises:
        DecodeError: it is none.

    """
    facts = _object(payload)
    role = facts.get("producer")
    if role not in ("engine", "worker"):
        raise DecodeError(f"header: of a newer profilemate: producer {_shown(role)}")
    _check(facts, {**_OF_ALL, **(_OF_ENGINE if role == "engine" else _OF_WORKER)}, "header")
    pools = tuple(_pool(pool) for pool in facts.get("pools", ()))
    group_pools = tuple(group["pool"] for group in facts.get("groups", ()))
    if role == "engine":
        blocks = sum(pool.blocks for pool in pools)
        if blocks > MAX_BLOCKS:
            raise DecodeError(f"header: {blocks:,} blocks, more than {MAX_BLOCKS:,}")
        if max(group_pools, default=0) >= len(pools):
            raise DecodeError("header: a group of a pool that is not there")
    else:
        pools, group_pools = (), ()
    length = (facts.get("cache") or {}).get("max_model_len") or 0 if role == "engine" else 0
    return Header(
        facts=facts,
        role=role,
        rank=facts["rank"],
        pid=facts["pid"],
        start=facts.get("start") or "",
        since=facts.get("since"),
        pools=pools,
        group_pools=group_pools,
        caching=bool(facts.get("caching")),
        hash_block_size=facts.get("hash_block_size") or 1,
        prefix_unit=facts.get("told_by_content") or 0,
        # A scheduler without a server in front of it takes any prompt.
        max_tokens=max(1 << 20, min(MAX_TOKENS, length)),
        gpu_timing=bool(facts.get("gpu_timing")),
    )


def read_status(payload: bytes) -> dict[str, Any]:
    """What changed about the producer.

    Raises:
        DecodeError: it is not what a producer writes.

    """
    status = _object(payload)
    _check(status, _OF_STATUS, "status")
    return status


def _pool(pool: Mapping[str, Any]) -> PoolFacts:
    blocks, null = pool["blocks"], pool.get("null")
    if null is not None and null >= blocks:
        raise DecodeError(f"header: null block {null:,} of {blocks:,} blocks")
    usage_blocks = pool.get("usage_blocks")
    if usage_blocks is None:
        usage_blocks = blocks - (null is not None)
    return PoolFacts(blocks, null, usage_blocks)


def _object(payload: bytes) -> dict[str, Any]:
    try:
        found = json.loads(payload, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"it has no JSON: {_shown(error)}") from None
    if not isinstance(found, dict):
        raise DecodeError("it has no JSON object")
    if _is_deep(found, _MAX_DEPTH):
        raise DecodeError(f"its JSON is nested more than {_MAX_DEPTH} deep")
    return {name: value for name, value in found.items() if value is not None}


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number")
    return number


def _is_deep(value: Any, left: int) -> bool:
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        return not left or any(_is_deep(part, left - 1) for part in inner)
    return False


def _shown(value: object) -> str:
    text = value if isinstance(value, Exception) else repr(value)
    return str(text)[:_MAX_SHOWN]


def _check(facts: Mapping[str, Any], checks: Mapping[str, Check], what: str) -> None:
    for name, check in checks.items():
        if not check(facts.get(name)):
            raise DecodeError(f"{what}: {name} cannot be {_shown(facts.get(name))}")


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 1 << 16


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _whole(least: int, most: int) -> Check:
    return lambda value: type(value) is int and least <= value <= most


def _real(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MAX_NUMBER and math.isfinite(value)


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check, most: int) -> Check:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value))


def _by_name(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _record(**checks: Check) -> Check:
    return lambda value: (
        isinstance(value, dict) and all(check(value.get(name)) for name, check in checks.items())
    )


_count = _whole(0, _MAX_NUMBER)
_some_count = _optional(_count)
_bytes = _whole(-_MAX_NUMBER, _MAX_NUMBER)
_some_text = _optional(_text)
_some_flag = _optional(_flag)

_OF_ALL: dict[str, Check] = {
    "rank": _whole(0, MAX_RANK),
    "pid": _whole(1, (1 << 31) - 1),
    "start": _some_text,
    "since": _optional(_whole(0, 1 << 63)),
    "hooks": _optional(
        _list_of(_record(name=_text, attached=_some_flag, reason=_some_text), 1 << 10)
    ),
    "versions": _optional(_by_name(_some_text)),
    "device": _some_text,
    "deployment": _some_text,
}

_OF_ENGINE: dict[str, Check] = {
    "pools": lambda value: (
        bool(value)
        and _list_of(
            _record(
                blocks=_whole(1, _MAX_NUMBER),
                null=_some_count,
                usage_blocks=_some_count,
            ),
            MAX_POOLS,
        )(value)
    ),
    "groups": _list_of(_record(pool=_whole(0, MAX_POOLS - 1)), MAX_GROUPS),
    "caching": _flag,
    "hash_block_size": _whole(1, MAX_TOKENS),
    "told_by_content": _whole(0, MAX_TOKENS),
    "cache": _optional(_record(max_model_len=_some_count)),
    "parallel": _optional(_record(data=_some_count)),
    "model": _optional(_record()),
    "scheduler": _optional(_record()),
    "content_ids_shared": _some_flag,
    "content_basis": _some_text,
    "contents_apart_because": _some_text,
    "phases": _some_flag,
}

_OF_WORKER: dict[str, Check] = {
    "gpu": _optional(
        _record(
            index=_optional(_whole(0, 1 << 10)),
            visible=_some_text,
            uuid=_some_text,
            name=_some_text,
            total_bytes=_some_count,
        )
    ),
    "gpu_timing": _some_flag,
    "phases": _some_flag,
    "gpu_interval_sec": _optional(_real),
    "pynvml": _some_text,
    "cuda_graphs": _optional(_record()),
}

_OF_STATUS: dict[str, Check] = {
    "dropped_events": _some_count,
    "flushes": _some_count,
    "hook_ns": _some_count,
    "writing_ns": _some_count,
    "bytes": _some_count,
    "earlier_bytes": _some_count,
    "next": _some_count,
    "failed": _optional(_by_name(_text)),
    "lost": _optional(_by_name(_record(tables=_text, reason=_text))),
    "methods": _optional(_record()),
    "memory": _optional(_by_name(lambda value: _some_flag(value) or _bytes(value))),
    "cuda_graphs": _optional(_record()),
    "experts": _optional(
        _record(
            layers=_optional(_list_of(_whole(0, MAX_LAYERS), MAX_LAYERS)),
            experts=_some_count,
            chosen=_some_count,
            pairs=_some_flag,
            ranks=_some_count,
            eplb=_some_flag,
            problem=_some_text,
        )
    ),
}
