# SPDX-License-Identifier: Apache-2.0
"""Content ids: numbers that stand for what a block holds, as the tables spell them."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from hashlib import blake2s
from typing import NamedTuple

from profilemate.format.events import HASH_BYTES

_MASK = (1 << 53) - 1
"""The bits that a JSON number holds exactly."""


class Ids(NamedTuple):
    """The two ways of an engine to ids: ``of_hashes`` turns hashes, one after the other, into
    content ids, and ``once`` a number that the engine counts into an id that no other content
    has."""

    of_hashes: Callable[[bytes], list[str]]
    once: Callable[[int], str]


def ids_of(key: bytes, own: bytes) -> Ids:
    """The ids of an engine whose contents have this key; ``own`` is the session's."""
    if key == own:
        return Ids(content_ids(key), str)
    # Two sessions with the same key count alike.
    of_own = content_ids(own)
    return Ids(content_ids(key), lambda number: of_own(number.to_bytes(HASH_BYTES, "little"))[0])


def content_ids(key: bytes) -> Callable[[bytes], list[str]]:
    """The function that turns hashes, one after the other, into content ids.

    An id is a digest of the session's secret and vLLM's block hash, so nobody who lacks the
    secret can find out which prompt it stands for. The secret comes first: BLAKE2 is safe from
    length extension, the lengths are fixed, and both fit the one block that it works on at a
    time. Its own keyed mode takes two.
    """
    start = blake2s(key, digest_size=8).copy
    iter_unpack = struct.Struct(f"{HASH_BYTES}s").iter_unpack

    def ids(hashes: bytes) -> list[str]:
        digests = []
        for (block_hash,) in iter_unpack(hashes):
            state = start()
            state.update(block_hash)
            digests.append(state.digest())
        return [f"{digest & _MASK}" for digest in array("Q", b"".join(digests))]

    return ids
