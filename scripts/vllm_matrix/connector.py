# SPDX-License-Identifier: Apache-2.0
"""A KV connector for the scheduler's side: who has which tokens elsewhere, and when they come.

Nothing is moved, as there is no model: a load that takes a while is reported as done when its
step's results are, and so is a transfer after a request's end. This is imported by vLLM, when a
scheduler is made.
"""

from __future__ import annotations

import inspect
from typing import Any

import vllm.distributed.kv_transfer.kv_connector.v1.base as base

from scripts.vllm_matrix.adapt import BLOCK_SIZE

_SUPPORTS_GROUPS = getattr(base, "SupportsHMA", object)
_LOOKUP = base.KVConnectorBase_V1.get_num_new_matched_tokens
_ONLY_TOKENS = inspect.signature(_LOOKUP).return_annotation is int
"""Up to 0.8.5 no load takes longer than the step."""


class Elsewhere(base.KVConnectorBase_V1, _SUPPORTS_GROUPS):  # type: ignore[misc, valid-type]
    """Has the first half of every second prompt. Each fourth one takes a step to come.

    ``loaded`` has by request the tokens that it was asked to load, of all its admissions.
    """

    supports_divergent_local_hybrid_hits = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loaded: dict[str, int] = {}
        self._slow: set[str] = set()
        self._receiving: set[str] = set()
        self._sending: set[str] = set()

    def take_finished(self) -> tuple[set[str], set[str]]:
        """The requests whose transfers, out and in, have ended by now."""
        finished = self._sending, self._receiving
        self._sending, self._receiving = set(), set()
        return finished

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        number = int(request.request_id.rpartition("-")[2])
        half = request.num_prompt_tokens // 2 // BLOCK_SIZE * BLOCK_SIZE
        more = 0 if number % 2 else max(0, half - num_computed_tokens)
        if _ONLY_TOKENS:
            return more
        slow = more > 0 and number % 4 == 0
        if slow:
            self._slow.add(request.request_id)
        return more, slow

    def update_state_after_alloc(self, request: Any, *blocks_and_tokens: Any) -> None:
        tokens, name = blocks_and_tokens[-1], request.request_id
        if tokens:
            self.loaded[name] = self.loaded.get(name, 0) + tokens
            if name in self._slow:
                self._receiving.add(name)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return base.KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Every third request's blocks are kept until they have been sent on."""
        kept = int(request.request_id.rpartition("-")[2]) % 3 == 0
        if kept:
            self._sending.add(request.request_id)
        return kept, None

    request_finished_all_groups = request_finished

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """The worker's."""

    save_kv_layer = wait_for_layer_load = wait_for_save = start_load_kv
