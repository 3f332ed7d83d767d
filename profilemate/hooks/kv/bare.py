# SPDX-License-Identifier: Apache-2.0
"""Hash a prompt as if it had neither a cache salt nor an adapter.

vLLM's hashes of two tenants' blocks differ even where their tokens are the same. Their bare hashes
do not, and a request with neither salt nor adapter has its own hashes for them. vLLM's own hasher
makes them, so they are what vLLM would have made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

Hasher = Callable[[Any], Sequence[Any]]


def hashers(manager: Any) -> Callable[[Any], Hasher | None]:
    """Which function does this release hash the blocks of a request with? None: not known.

    ``manager`` is the KV cache manager, which is not kept.
    """
    # Up to 0.10.0 the KV cache manager hashes.
    utils = sys.modules.get("vllm.v1.core.kv_cache_utils")
    hash_tokens = getattr(utils, "hash_request_tokens", None)
    function = getattr(manager, "caching_hash_fn", None)
    size = getattr(manager, "block_size", None)
    if hash_tokens is not None and function is not None and size:
        if not getattr(manager, "enable_caching", False):
            return lambda request: None
        return lambda request: lambda bare: hash_tokens(function, size, bare)

    def of_request(request: Any) -> Hasher | None:
        hasher: Hasher | None = getattr(request, "_block_hasher", None)
        if hasher is None:
            # From 0.10.1 to 0.11 it has the request itself as its argument.
            hasher = getattr(getattr(request, "get_hash_new_full_blocks", None), "func", None)
        return hasher

    return of_request


class Bare:
    """A request's prompt, as a hasher sees it: without its salt, its adapter and its answer.

    All else is the request's own.
    """

    def __init__(self, request: Any) -> None:
        # A hasher asks for the same few attributes at each block, so they are at hand.
        self.__dict__.update(getattr(request, "__dict__", {}))
        self._request = request
        self.lora_request = None
        self.cache_salt = None
        self.block_hashes: tuple[()] = ()
        self.num_tokens = request.num_prompt_tokens
        self.all_token_ids = request.all_token_ids[: self.num_tokens]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
