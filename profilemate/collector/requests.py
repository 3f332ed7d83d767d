# SPDX-License-Identifier: Apache-2.0
"""One request as the collector knows it, and its row in requests.jsonl."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from profilemate.collector.tables import text_cell
from profilemate.events import HASH_BYTES, PREFIX_BYTES


@dataclass(slots=True)
class Request:
    """A request from its arrival to its row. Times are monotonic nanoseconds."""

    number: int
    request_id: str
    cell: str
    prompt_tokens: int
    lora: str | None
    tenant: int | None
    priority: int
    prefix_ids: list[int]
    arrived: int
    tables: dict[int, list[int]] = field(default_factory=dict)
    admitted: int | None = None
    first_token: int | None = None
    preemptions: int = 0
    preempted_tokens: int = 0
    """The most tokens it had computed when it was preempted."""
    hit_tokens: int | None = None
    external_hit_tokens: int | None = None
    freed_blocks: int | None = None
    """Blocks given up since the request ended; None while it has not."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the request's block tables, all groups."""
        return sum(map(len, self.tables.values()))


@dataclass(frozen=True)
class Finish:
    """How a request ended. ``hashes`` are those of its full blocks, where the engine told them.

    The prompt of a request whose input streams in has grown since it arrived.
    """

    reason: str
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    hashes: list[int]
    time: int


def parse_request(number: int, blob: bytes, time: int) -> Request:
    """The request that a REQUEST event describes."""
    text, _, prefixes = blob.partition(b"\0")
    described = json.loads(text)
    return Request(
        number=number,
        request_id=described["id"],
        cell=text_cell(described["id"]),
        prompt_tokens=described["prompt"],
        lora=described["lora"],
        tenant=described["tenant"],
        priority=described["priority"],
        prefix_ids=_numbers(prefixes, PREFIX_BYTES),
        arrived=time,
    )


def parse_finish(request: Request, blob: bytes, time: int) -> Finish:
    """What a FINISH event says of this request."""
    text, _, hashes = blob.partition(b"\0")
    outcome = json.loads(text)
    return Finish(
        reason=outcome["reason"],
        prompt_tokens=outcome["prompt"],
        output_tokens=outcome["output"],
        # vLLM counts from 0 again after a preemption.
        computed_tokens=max(outcome["computed"], request.preempted_tokens),
        hashes=_numbers(hashes, HASH_BYTES),
        time=time,
    )


def _numbers(data: bytes, width: int) -> list[int]:
    return [int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width)]


def row(
    request: Request,
    finish: Finish,
    engine: int,
    origin_ns: int,
    block_size: int,
    prompt_ids: list[int],
    output_ids: list[int],
) -> str:
    """The request's line of requests.jsonl, Mooncake's fields first.

    Args:
        request: the request.
        finish: how it ended.
        engine: the engine's data-parallel rank.
        origin_ns: monotonic nanoseconds at second 0 of the session.
        block_size: tokens that one content id stands for.
        prompt_ids: content ids of the prompt's blocks.
        output_ids: content ids of the full blocks that follow.

    """

    def since_start(time: int | None) -> float | None:
        return None if time is None else round((time - origin_ns) / 1e9, 6)

    queued = None if request.admitted is None else request.admitted - request.arrived
    fields: dict[str, Any] = {
        "timestamp": round((request.arrived - origin_ns) / 1e6, 3),
        "input_length": request.prompt_tokens,
        "output_length": finish.output_tokens,
        "hash_ids": prompt_ids,
        "block_size": block_size,
        "request_id": request.request_id,
        "engine": engine,
        "output_hash_ids": output_ids,
        "hit_tokens": request.hit_tokens or 0,
        "external_hit_tokens": request.external_hit_tokens or 0,
        "preemptions": request.preemptions,
        "num_blocks": request.freed_blocks or 0,
        "queue_sec": None if queued is None else round(queued / 1e9, 6),
        "first_token_sec": since_start(request.first_token),
        "finish_sec": since_start(finish.time),
        "finish_reason": finish.reason,
        "prefix_ids": request.prefix_ids,
        "lora": request.lora,
        "tenant": request.tenant,
        "priority": request.priority,
        "computed_tokens": finish.computed_tokens,
    }
    return json.dumps(fields, separators=(",", ":"))
