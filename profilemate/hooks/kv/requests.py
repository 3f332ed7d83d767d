# SPDX-License-Identifier: Apache-2.0
"""Which number stands for a request, and what is said of it when it comes and goes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from profilemate.format.events import HASH_BYTES, PREFIX_BYTES, REASONS, Op, prefix_lengths
from profilemate.record import encode
from profilemate.record.recorder import Recorder


class Requests:
    """Numbers the live requests of one scheduler. ``index`` maps request id to number.

    ``hashes_of`` tells the hashes of a request's full blocks. ``hashes_on_finish``: a request's
    block table does not tell its contents, so they are told when it ends. ``told_by_content``:
    prefixes that end at a multiple of this many tokens are told by the contents of blocks and
    need no id of their own; 0: none are. ``running`` is the status of a request that runs.
    ``looked_up`` are the numbers of those that were looked up in this step. ``forgotten_by_steps``:
    the hooks of a request's end are lost, so the steps' outputs say who has ended.
    """

    def __init__(
        self,
        recorder: Recorder,
        key: bytes,
        hashes_of: Callable[[Any], Sequence[bytes]],
        *,
        hashes_on_finish: bool,
        told_by_content: int,
    ) -> None:
        self.index: dict[str, int] = {}
        self._keep = recorder.keep
        self._key = key
        self._hashes_of = hashes_of
        self.hashes_on_finish = hashes_on_finish
        self._told_by_content = told_by_content
        self.forgotten_by_steps = False
        self._next = 0
        self.looked_up: set[int] = set()
        self._reasons: dict[int, int] = {}
        statuses = sys.modules["vllm.v1.request"].RequestStatus
        self.running = int(statuses.RUNNING)
        self._preempted = int(statuses.PREEMPTED)

    def number(self, request: Any, now: int) -> int:
        """The request's number; one that was not seen before is described in the journal."""
        number = self.index.get(request.request_id)
        if number is None:
            number = self.index[request.request_id] = self._next
            self._next += 1
            blob = _NOT_DESCRIBED
            try:
                blob = orjson.dumps(_description(request, self._key)) + b"\0"
                blob += _prefix_ids(request, self._key, self._told_by_content)
            finally:
                # What refers to the number needs it, even where this raises.
                self._keep((encode.blob, Op.REQUEST, now, number, blob))
        return number

    def finish(self, request: Any, now: int) -> None:
        """Say how the request ended. It keeps its number until its blocks are given up."""
        number = self.number(request, now)
        reason = self._reasons.get(request.status)
        if reason is None:
            reason = self._reasons[request.status] = _reason(request)
        has_hashes = self.hashes_on_finish or reason == _ABORT
        hashes = list(self._hashes_of(request)) if has_hashes else ()
        told = (
            number,
            request.num_prompt_tokens,
            request.num_output_tokens,
            request.num_computed_tokens,
            len(hashes),
            reason,
        )
        self._keep((encode.finished, Op.FINISH, now, told, hashes))

    def tell_hashes(self) -> None:
        """A request's block table no longer tells its contents."""
        self.hashes_on_finish = True

    def lose_ends(self) -> None:
        """The hooks of a request's end are lost: the steps' outputs say who has ended."""
        self.forgotten_by_steps = True

    def forget(self, request_id: str, now: int, *, is_told: bool) -> None:
        """The request has ended, and the hooks that would have said so are lost.

        ``is_told`` says that ``finish`` was.
        """
        number = self.index.pop(request_id, None)
        if number is not None and not is_told:
            told = number, 0, 0, 0, 0, _OTHER
            self._keep((encode.finished, Op.FINISH, now, told, ()))

    def leaving(self, request: Any, now: int) -> int:
        """The number of a request that gives up its blocks; one that has ended is forgotten."""
        # As vLLM's is_finished() has it, without the calls.
        if request.status > self._preempted and not self.forgotten_by_steps:
            number = self.index.pop(request.request_id, None)
            if number is not None:
                return number
        return self.number(request, now)


def hashes_of(manager: Any) -> Callable[[Any], Sequence[bytes]]:
    """What tells the hashes of a request's full blocks, as the KV cache manager has them."""
    # Up to vLLM 0.10.0 it keeps them itself, from 0.10.1 on the request does.
    kept = getattr(manager, "req_to_block_hashes", None)

    def hashes(request: Any) -> Sequence[Any]:
        found = request.block_hashes if kept is None else kept.get(request.request_id, ())
        numbers = bool(found) and isinstance(found[0], tuple)
        return list(map(hash_bytes, found)) if numbers else found

    return hashes


def hash_bytes(block_hash: Any) -> Any:
    """The bytes of a block hash, with or without its group; up to vLLM 0.10.1 it is a number."""
    if not isinstance(block_hash, tuple):
        return block_hash
    without_group: Any = getattr(block_hash, "block_hash", block_hash)
    return (without_group.hash_value & _HASH_MASK).to_bytes(HASH_BYTES, "little")


_HASH_MASK = (1 << 8 * HASH_BYTES) - 1
_NOT_DESCRIBED = b'["",0]\0'
_ABORT = REASONS.index("abort")
_OTHER = REASONS.index("other")


def _reason(request: Any) -> int:
    name = str(request.get_finished_reason())
    return REASONS.index(name if name in REASONS else "other")


def _description(request: Any, key: bytes) -> list[Any]:
    """Its id, prompt tokens, adapter, tenant and priority, without the end that says nothing."""
    lora = request.lora_request
    salt = getattr(request, "cache_salt", None)
    described = [
        _utf8(request.request_id).decode(),
        request.num_prompt_tokens,
        getattr(request, "priority", 0),
        None if lora is None else getattr(lora, "lora_name", None) or lora.name,
        None if not salt else _number(blake2b(_utf8(salt), **_keyed(key))),
    ]
    while len(described) > 2 and not described[-1]:
        described.pop()
    return described


def _utf8(text: str) -> bytes:
    """A client's text; half a surrogate pair, which has no bytes of its own, is spelled out."""
    return text.encode("utf-8", "backslashreplace")


def _keyed(key: bytes) -> dict[str, Any]:
    return {"key": key, "digest_size": PREFIX_BYTES}


def _number(digest: Any) -> int:
    return int.from_bytes(digest.digest(), "little")


def _prefix_ids(request: Any, key: bytes, told_by_content: int) -> bytes:
    """Keyed digests of the prompt's first tokens, one a length of ``prefix_lengths`` that is not
    told by content.

    An adapter, a cache salt and the multimodal inputs that begin before a length's end are part
    of it, as they are of vLLM's block hashes.
    """
    tokens = request.prompt_token_ids
    if tokens is None:
        return b""
    lengths = prefix_lengths(len(tokens))
    if told_by_content:
        lengths = [length for length in lengths if length % told_by_content]
    if not lengths:
        return b""
    lora, salt = request.lora_request, getattr(request, "cache_salt", None)
    digest = blake2b(repr((lora and lora.lora_int_id, salt)).encode(), **_keyed(key))
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


def _media(request: Any) -> list[tuple[int, str]]:
    features = getattr(request, "mm_features", None)
    if features is None:
        # Up to vLLM 0.10.1.
        positions = getattr(request, "mm_positions", ())
        names = getattr(request, "mm_hashes", ())
        return [(p.offset, str(name)) for p, name in zip(positions, names, strict=False)]
    return [(feature.mm_position.offset, str(feature.identifier)) for feature in features]
