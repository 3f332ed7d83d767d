# SPDX-License-Identifier: Apache-2.0
"""Number the requests, and record when they come and go."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import orjson

from profilemate.format.events import (
    CAME_BEFORE,
    HASH_BYTES,
    PREEMPTED_BEFORE,
    PREFIX_BYTES,
    REASONS,
    More,
    Op,
    prefix_lengths,
)
from profilemate.hooks.kv import traces
from profilemate.hooks.kv.bare import Bare, Hasher
from profilemate.record import encode
from profilemate.record.recorder import Recorder

LONG_BYTES = 1_000
"""A description of more bytes than this was given a long id, adapter or prompt."""

TOKEN_BYTES = 8
"""What vLLM keeps for each token of a request, at most: for 16 tokens a hash of 32 bytes in an
object of its own, and references to it and to a block."""


class Requests:
    """Numbers the requests of one scheduler that have not ended. ``index`` maps ids to numbers.

    ``hashes_of`` returns the hashes of a request's full blocks. ``hashes_on_finish``: a request's
    block table does not lead to its contents, so its end is recorded with their hashes.
    ``hasher_of`` returns the function that hashes a request's blocks, if it is known.
    ``prefix_unit``: prefixes that end at a multiple of this many tokens have a content's id and
    need none of their own; 0: all need one. ``running`` is the status of a request that runs.
    ``looked_up`` has the numbers of the requests that were looked up in this step.
    ``forgotten_by_steps``: the hooks of a request's end are lost, so the steps' outputs say which
    requests have ended. ``next_number`` is that of the next request.
    ``drafts`` has by number the tokens that speculation proposed, and those that were accepted;
    None where there is no speculation, or it is not known.
    """

    def __init__(
        self,
        recorder: Recorder,
        key: bytes,
        hashes_of: Callable[[Any], Sequence[bytes]],
        hasher_of: Callable[[Any], Hasher | None],
        *,
        hashes_on_finish: bool,
        prefix_unit: int,
        next_number: int = 0,
    ) -> None:
        self.index: dict[str, int] = {}
        self._keep = recorder.keep
        self._weigh = recorder.weigh
        self._key = key
        self._hashes_of = hashes_of
        self._hasher_of = hasher_of
        self.hashes_on_finish = hashes_on_finish
        self._prefix_unit = prefix_unit
        self.forgotten_by_steps = False
        self.next_number = next_number
        self.looked_up: set[int] = set()
        self.drafts: dict[int, list[int]] | None = None
        self._reasons: dict[int, int] = {}
        statuses = sys.modules["vllm.v1.request"].RequestStatus
        self.running = int(statuses.RUNNING)
        self._preempted = int(statuses.PREEMPTED)

    def number(self, request: Any, now: int) -> int:
        """The request's number. A new request is described in the journal."""
        number = self.index.get(request.request_id)
        if number is None:
            number = self._new(request)
            event: encode.Event = (encode.blob, Op.REQUEST, now, number, _NOT_DESCRIBED)
            size = 0
            try:
                described = _description(request, self._key)
                prefixes = _prefix_ids(request, self._key, self._prefix_unit)
                if described[_LORA] is None and described[_TENANT] is None:
                    blob = orjson.dumps(_shortened(described)) + b"\0" + prefixes
                    event, size = (encode.blob, Op.REQUEST, now, number, blob), len(blob)
                else:
                    text, bare = orjson.dumps(described), self._bare(request)
                    event = (encode.set_apart, Op.REQUEST, now, number, text, prefixes, bare)
                    size = len(text) + len(prefixes) + TOKEN_BYTES * request.num_prompt_tokens
            finally:
                # Later events refer to the number, even where this raises.
                self._keep(event)
                if size > LONG_BYTES:
                    self._weigh(size)
            # vLLM hands these on only where it has a place to send traces to.
            headers = getattr(request, "trace_headers", None)
            if headers:
                self._keep_trace(number, headers, now)
        return number

    def _keep_trace(self, number: int, headers: Any, now: int) -> None:
        """Record the trace that the request belongs to, and nothing else of its headers."""
        found = traces.parent(headers)
        if found is not None:
            self._keep((encode.more, Op.MORE, now, More.TRACE, (number, *found)))

    def _bare(self, request: Any) -> Callable[[], Sequence[bytes] | None] | None:
        """What hashes the request's prompt without salt and adapter; None where nothing can."""
        hasher = self._hasher_of(request)
        if hasher is None or getattr(request, "prompt_embeds", None) is not None:
            return None
        return partial(_bare_hashes, hasher, Bare(request))

    def carry(self, request: Any, now: int) -> int:
        """Number and describe a request that came before the recording went on."""
        number = self._new(request)
        described = _description(request, self._key)
        is_preempted = request.status == self._preempted
        described[_STATE] = PREEMPTED_BEFORE if is_preempted else CAME_BEFORE
        blob = orjson.dumps(_shortened(described)) + b"\0"
        self._keep((encode.blob, Op.REQUEST, now, number, blob))
        return number

    def _new(self, request: Any) -> int:
        number = self.index[request.request_id] = self.next_number
        self.next_number += 1
        return number

    def finish(self, request: Any, now: int) -> None:
        """Record how the request ended. It keeps its number until its blocks are given up."""
        number = self.number(request, now)
        reason = self._reasons.get(request.status)
        if reason is None:
            reason = self._reasons[request.status] = _reason(request)
        if self.drafts is not None:
            values = (number, *self.drafts.pop(number, (0, 0)))
            self._keep((encode.more, Op.MORE, now, More.DRAFTS, values))
        # A preempted one may end by a step that was under way: it has no blocks any more.
        has_blocks = request.num_computed_tokens > 0
        has_hashes = self.hashes_on_finish or reason == _ABORT or not has_blocks
        hashes = list(self._hashes_of(request)) if has_hashes else ()
        numbers = (
            number,
            request.num_prompt_tokens,
            request.num_output_tokens,
            request.num_computed_tokens,
            len(hashes),
            reason,
        )
        self._keep((encode.finished, Op.FINISH, now, numbers, hashes))
        # Events that wait keep the request's hashes and lists of blocks alive.
        self._weigh(TOKEN_BYTES * (request.num_prompt_tokens + request.num_output_tokens))

    def record_hashes(self) -> None:
        """From now on a request's end needs its hashes: block tables no longer suffice."""
        self.hashes_on_finish = True

    def lose_ends(self) -> None:
        """The hooks of a request's end are lost: the steps' outputs have to say who ended."""
        self.forgotten_by_steps = True

    def forget(self, request_id: str, now: int, *, has_finished: bool) -> None:
        """The request has ended, and some hook that would have seen it is lost.

        ``has_finished``: ``finish`` was called all the same.
        """
        number = self.index.pop(request_id, None)
        if number is not None and not has_finished:
            numbers = number, 0, 0, 0, 0, _OTHER
            self._keep((encode.finished, Op.FINISH, now, numbers, ()))

    def leaving(self, request: Any, now: int) -> int:
        """The number of a request that gives its blocks up. One that has ended loses its number."""
        # As vLLM's is_finished() has it, without the calls.
        if request.status > self._preempted and not self.forgotten_by_steps:
            number = self.index.pop(request.request_id, None)
            if number is not None:
                return number
        return self.number(request, now)


def hashes_of(manager: Any) -> Callable[[Any], Sequence[bytes]]:
    """The function that returns the hashes of a request's full blocks."""
    # Up to vLLM 0.10.0 the KV cache manager has them, from 0.10.1 on the request.
    by_request = getattr(manager, "req_to_block_hashes", None)

    def hashes(request: Any) -> Sequence[Any]:
        if by_request is None:
            found = request.block_hashes
        else:
            found = by_request.get(request.request_id, ())
        numbers = bool(found) and isinstance(found[0], tuple)
        return list(map(hash_bytes, found)) if numbers else found

    return hashes


def group_of(block_hash: Any) -> int:
    """The KV cache group that a block's hash names; 0 in releases where it names none."""
    if isinstance(block_hash, tuple):
        return int(getattr(block_hash, "group_id", 0))
    has_group = len(block_hash) % HASH_BYTES == _GROUP_BYTES
    return int.from_bytes(block_hash[-_GROUP_BYTES:], "big") if has_group else 0


def hash_bytes(block_hash: Any) -> Any:
    """The bytes of a block hash, with or without its group; up to vLLM 0.10.1 it is a number."""
    if not isinstance(block_hash, tuple):
        return block_hash
    without_group: Any = getattr(block_hash, "block_hash", block_hash)
    return (without_group.hash_value & _HASH_MASK).to_bytes(HASH_BYTES, "little")


_GROUP_BYTES = 4
"""vLLM puts the group behind a hash of 32 bytes, or of 16."""

_HASH_MASK = (1 << 8 * HASH_BYTES) - 1
_NOT_DESCRIBED = b'["",0]\0'
_ABORT = REASONS.index("abort")
_OTHER = REASONS.index("other")


def _reason(request: Any) -> int:
    name = str(request.get_finished_reason())
    return REASONS.index(name if name in REASONS else "other")


_LORA, _TENANT, _STATE = 3, 4, 5
"""Places in a description."""


def _description(request: Any, key: bytes) -> list[Any]:
    """Id, prompt tokens, priority, adapter, tenant, 0 for a request that is new, and the number of
    the API server that sent it.

    Up to vLLM 0.8 there is one API server.
    """
    lora = request.lora_request
    salt = getattr(request, "cache_salt", None)
    return [
        _utf8(request.request_id).decode(),
        request.num_prompt_tokens,
        getattr(request, "priority", 0),
        None if lora is None else getattr(lora, "lora_name", None) or lora.name,
        None if not salt else _number(blake2b(_utf8(salt), **_keyed(key))),
        0,
        getattr(request, "client_index", 0),
    ]


def _shortened(described: list[Any]) -> list[Any]:
    """The description without empty values at the end."""
    while len(described) > 2 and not described[-1]:
        described.pop()
    return described


def _bare_hashes(hasher: Hasher, bare: Bare) -> Sequence[bytes] | None:
    """The bare hashes of the prompt's full blocks; None where the hasher cannot make them."""
    try:
        return list(map(hash_bytes, hasher(bare)))
    except Exception:
        return None


def _utf8(text: str) -> bytes:
    """A client's text as bytes; half a surrogate pair, which has none, is spelled out."""
    return text.encode("utf-8", "backslashreplace")


def _keyed(key: bytes) -> dict[str, Any]:
    return {"key": key, "digest_size": PREFIX_BYTES}


def _number(digest: Any) -> int:
    return int.from_bytes(digest.digest(), "little")


def _prefix_ids(request: Any, key: bytes, unit: int) -> bytes:
    """Keyed digests of the prompt's prefixes: one for each of the ``prefix_lengths`` that is no
    multiple of the unit.

    A digest covers the adapter, the cache salt and the multimodal inputs that begin within the
    prefix, as vLLM's block hashes do.
    """
    tokens = request.prompt_token_ids
    if tokens is None:
        return b""
    lengths = prefix_lengths(len(tokens))
    if unit:
        lengths = [length for length in lengths if length % unit]
    if not lengths:
        return b""
    salt = getattr(request, "cache_salt", None)
    digest = blake2b(repr((_adapter(request.lora_request), salt)).encode(), **_keyed(key))
    width = array("i").itemsize
    data = memoryview(array("i", tokens[: lengths[-1]]).tobytes())
    media = sorted(_media(request), reverse=True)
    ids, begin = [], 0
    for end in lengths:
        while media and media[-1][0] < end:
            digest.update(repr(media.pop()).encode())
        digest.update(data[begin * width : end * width])
        ids.append(digest.copy().digest())
        begin = end
    return b"".join(ids)


def _adapter(lora: Any) -> tuple[str, str] | None:
    """The adapter as every process calls it, and as vLLM's block hashes have it: its number is of
    one process."""
    if lora is None:
        return None
    path = getattr(lora, "lora_path", None) or getattr(lora, "lora_local_path", None)
    return str(getattr(lora, "lora_name", None) or lora.name), str(path)


def _media(request: Any) -> list[tuple[int, str]]:
    features = getattr(request, "mm_features", None)
    if features is None:
        # Up to vLLM 0.10.1.
        positions = getattr(request, "mm_positions", ())
        names = getattr(request, "mm_hashes", ())
        return [(p.offset, str(name)) for p, name in zip(positions, names, strict=False)]
    return [(feature.mm_position.offset, str(feature.identifier)) for feature in features]
