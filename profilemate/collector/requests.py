# SPDX-License-Identifier: Apache-2.0
"""One request as the collector knows it, and its row in requests.jsonl."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, NamedTuple

from profilemate.collector.decode import ImpossibleError
from profilemate.collector.tables import text_cell
from profilemate.format.events import (
    CAME_BEFORE,
    HASH_BYTES,
    NOT_KNOWN,
    PREEMPTED_BEFORE,
    PREFIX_BYTES,
    SPAN_ID,
    TRACE_ID,
    prefix_lengths,
)


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
    own_prefix_ids: list[str]
    """Ids of the prefixes that have no content's id."""
    arrived: int
    tables: dict[int, list[int]] = field(default_factory=dict)
    """Block ids by KV cache group."""
    leaving: list[int] = field(default_factory=list)
    """Blocks of the first group that a preempted request has not given up yet."""
    admitted: int | None = None
    first_token: int | None = None
    preemptions: int = 0
    preempted_tokens: int = 0
    """The most tokens that it had computed at any preemption."""
    hit_tokens: int | None = None
    external_hit_tokens: int | None = None
    freed_blocks: int | None = None
    """Blocks given up since the request ended; None while it has not."""
    lookup_row: str = ""
    """The row of the lookup with which it was last admitted."""
    refused_row: str = ""
    """The row of its last lookup, if that did not lead to its admission."""
    free_row: str = ""
    """The row with which it lost its blocks, if it has none since."""
    got: dict[str, list[int]] = field(default_factory=dict)
    """What its blocks came by (``allocate`` or ``reuse``), since it has some: when the first did,
    and how many, not counting what it got in other ways."""
    came_before: bool = False
    """It was there when the recording went on after a pause. What it did before is not known, so it
    has no row."""
    api_server: int = 0
    bare_ids: list[str] | None = None
    """Bare content ids of the prompt's full blocks, empty for a request without salt and adapter.
    None: not known."""
    draft_tokens: int | None = None
    """Tokens that speculation proposed. None: there was none, or it is not known."""
    accepted_tokens: int | None = None
    trace_id: str | None = None
    parent_span_id: str | None = None
    """Of the trace that its client has put it into. None: into none."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the request's block tables, all groups."""
        return sum(map(len, self.tables.values()))

    def gets(self, event: str, count: int, time: int) -> None:
        """So many blocks came by this event."""
        since = self.got.get(event)
        if since is None:
            self.got[event] = [time, count]
        else:
            since[1] += count

    def saved(self) -> list[Any]:
        """All of it, as JSON."""
        values = [getattr(self, name) for name in _FIELDS]
        return [[*each.items()] if isinstance(each, dict) else each for each in values]

    @classmethod
    def restored(cls, saved: list[Any]) -> Request:
        """The request as it was when it was ``saved``."""
        # An earlier release's collector saved fewer fields.
        known = dict(zip(_FIELDS, saved, strict=False))
        for name in ("tables", "got"):
            known[name] = dict(known[name])
        return cls(**known)


_FIELDS = tuple(each.name for each in fields(Request))


class Finish(NamedTuple):
    """How a request ended.

    The prompt of a request whose input streams in has grown since it arrived.
    """

    reason: str
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    time: int


_NULL = "null"

MOST_API_SERVERS = 1 << 16
"""No deployment has more."""

_to_json = json.JSONEncoder().encode
_from_json = json.JSONDecoder().decode

_json = lru_cache(1024, typed=True)(_to_json)
"""For values that most requests share."""

_DEFAULTS = [None, None, 0, None, None, 0, 0, 0]
"""What holds for a request whose description ends early."""


def parse_request(
    number: int, blob: bytes, time: int, max_tokens: int, ids_of: Callable[[bytes], list[str]]
) -> Request:
    """The request that a REQUEST event describes. ``ids_of`` turns hashes into content ids.

    Raises:
        ImpossibleError: it does not describe one, or one of more tokens than any has.

    """
    text, _, prefixes = blob.partition(b"\0")
    described = _from_json(text.decode())
    if not isinstance(described, list):
        raise ImpossibleError(f"request {number:,} is not described")
    described += _DEFAULTS[len(described) :]
    if len(described) != len(_DEFAULTS):
        raise ImpossibleError(f"request {number:,} is not described as one")
    request_id, prompt, priority, lora, tenant, state, api_server, bare = described
    if not (
        isinstance(request_id, str)
        and type(prompt) is type(priority) is type(api_server) is type(bare) is int
        and isinstance(lora, str | None)
        and (tenant is None or type(tenant) is int)
        and state in (0, CAME_BEFORE, PREEMPTED_BEFORE)
        and 0 <= api_server <= MOST_API_SERVERS
        and (bare == NOT_KNOWN or 0 <= bare * HASH_BYTES <= len(prefixes))
    ):
        raise ImpossibleError(f"request {number:,} is not described as one")
    if not 0 <= prompt <= max_tokens:
        raise ImpossibleError(f"request {number:,} has a prompt of {prompt:,} tokens")
    bare_ids = None
    if bare != NOT_KNOWN:
        bare_ids = ids_of(prefixes[: bare * HASH_BYTES])
        prefixes = prefixes[bare * HASH_BYTES :]
    own = [
        f"{int.from_bytes(prefixes[at : at + PREFIX_BYTES], 'little')}"
        for at in range(0, len(prefixes), PREFIX_BYTES)
    ]
    cell = text_cell(request_id)
    request = Request(number, request_id, cell, prompt, lora, tenant, priority, own, time)
    request.api_server, request.bare_ids = api_server, bare_ids
    request.came_before = bool(state)
    request.preemptions = int(state == PREEMPTED_BEFORE)
    return request


def count_drafts(requests: Mapping[int, Request], blob: bytes) -> None:
    """Note what speculation brought a request that ends, as ``More.DRAFTS`` says.

    Raises:
        ImpossibleError: no engine can have counted this.

    """
    values = _from_json(blob.decode())
    is_sound = (
        isinstance(values, list)
        and len(values) == len(("number", "drafted", "accepted"))
        and all(type(value) is int for value in values)
        and 0 <= values[2] <= values[1] <= MOST_DRAFTS
        and values[0] in requests
    )
    if not is_sound:
        raise ImpossibleError("drafts that are not counted as such")
    number, drafted, accepted = values
    requests[number].draft_tokens, requests[number].accepted_tokens = drafted, accepted


MOST_DRAFTS = 1 << 31
"""No request gets more."""


def note_trace(requests: Mapping[int, Request], blob: bytes) -> None:
    """Note which trace a request belongs to, as ``More.TRACE`` says.

    Raises:
        ImpossibleError: it names no request, or no trace.

    """
    values = _from_json(blob.decode())
    is_sound = (
        isinstance(values, list)
        and len(values) == len(("number", "trace", "span"))
        and type(values[0]) is int
        and values[0] in requests
        and all(isinstance(value, str) for value in values[1:])
        and _TRACE.fullmatch(values[1])
        and _SPAN.fullmatch(values[2])
    )
    if not is_sound:
        raise ImpossibleError("a trace that is not named as one")
    number, trace, span = values
    requests[number].trace_id, requests[number].parent_span_id = trace, span


_TRACE, _SPAN = re.compile(TRACE_ID), re.compile(SPAN_ID)


def prefix_ids(request: Request, prompt_tokens: int, unit: int, prompt_ids: list[str]) -> list[str]:
    """One id for each of the prompt's ``prefix_lengths``.

    A prefix that ends at a multiple of ``unit`` tokens (0: none does) has the content id of its
    last block, or null where the engine never had that content. The others have their own.
    """
    if not unit:
        return request.own_prefix_ids
    places = _places(_longest_prefix(prompt_tokens), unit)
    if _OWN not in places and len(prompt_ids) > max(places, default=-1):
        return [prompt_ids[place] for place in places]
    own, known = iter(request.own_prefix_ids), len(prompt_ids)
    return [
        next(own, _NULL) if place == _OWN else prompt_ids[place] if place < known else _NULL
        for place in places
    ]


_OWN = -1
"""Stands for a prefix with an id of its own."""


@lru_cache(256)
def _places(prompt_tokens: int, unit: int) -> list[int]:
    """Which of the prompt's contents each of its prefixes ends with, or ``_OWN``."""
    return [
        _OWN if length % unit else length // unit - 1 for length in prefix_lengths(prompt_tokens)
    ]


def _longest_prefix(prompt_tokens: int) -> int:
    """The last of a prompt's ``prefix_lengths``. There are less than a hundred such prefixes.

    >>> _longest_prefix(50), _longest_prefix(2000), _longest_prefix(5000)
    (48, 1024, 4096)
    """
    return prompt_tokens & ~15 if prompt_tokens < 1024 else 1 << prompt_tokens.bit_length() - 1


def row(
    request: Request,
    finish: Finish,
    engine: int,
    origin_ns: int,
    block_size: int,
    prompt_ids: list[str],
    output_ids: list[str],
    prefixes: list[str],
    lost: Collection[str],
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
        prefixes: ids of the prompt's prefixes.
        lost: the parts of the recording that have ended, whose fields are null.

    """
    # Where arrivals are not recorded, a request comes when it is looked up, within a step.
    waited = None if request.admitted is None else max(0, request.admitted - request.arrived)
    queued = _NULL if waited is None else _seconds(waited)
    first_token = request.first_token
    hit_tokens = _NULL if "lookups" in lost else request.hit_tokens or 0
    external = _NULL if "lookups" in lost else request.external_hit_tokens or 0
    preemptions = _NULL if "frees" in lost else request.preemptions
    blocks = _NULL if "blocks" in lost else request.freed_blocks or 0
    since = _NULL if first_token is None else _seconds(first_token - origin_ns)
    known = request.bare_ids
    bare = _NULL if known is None else f"[{','.join(known)}]"
    return (
        f'{{"timestamp":{round((request.arrived - origin_ns) / 1e6, 3)},'
        f'"input_length":{request.prompt_tokens},"output_length":{finish.output_tokens},'
        f'"hash_ids":[{",".join(prompt_ids)}],"block_size":{block_size},'
        f'"request_id":{_to_json(request.request_id)},"engine":{engine},'
        f'"output_hash_ids":[{",".join(output_ids)}],"hit_tokens":{hit_tokens},'
        f'"external_hit_tokens":{external},'
        f'"preemptions":{preemptions},"num_blocks":{blocks},'
        f'"queue_sec":{queued},"first_token_sec":{since},'
        f'"finish_sec":{_seconds(finish.time - origin_ns)},'
        f'"finish_reason":{_json(finish.reason)},"prefix_ids":[{",".join(prefixes)}],'
        f'"lora":{_json(request.lora)},"tenant":{_json(request.tenant)},'
        f'"priority":{_json(request.priority)},"computed_tokens":{finish.computed_tokens},'
        f'"api_server":{request.api_server},"bare_hash_ids":{bare},'
        f'"draft_tokens":{_json(request.draft_tokens)},'
        f'"accepted_tokens":{_json(request.accepted_tokens)},'
        f'"trace_id":{_quoted(request.trace_id)},'
        f'"parent_span_id":{_quoted(request.parent_span_id)}}}'
    )


def _quoted(digits: str | None) -> str:
    """An id of hexadecimal digits, which no two requests share, as JSON."""
    return _NULL if digits is None else f'"{digits}"'


def _seconds(duration_ns: int) -> str:
    """Seconds to the microsecond, in as few characters as JSON needs."""
    if duration_ns < 100_000:
        return f"{round(duration_ns / 1e9, 6)}"
    text = f"{duration_ns / 1e9:.6f}".rstrip("0")
    return f"{text}0" if text.endswith(".") else text
