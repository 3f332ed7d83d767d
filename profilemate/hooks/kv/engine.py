# SPDX-License-Identifier: Apache-2.0
"""Waits for ``vllm.v1.engine.core``: a scheduler that is not derived from vLLM's is watched too."""

from __future__ import annotations

from typing import Any

import wrapt

from profilemate.hooks.kv import watch


def attach(module: Any) -> None:
    """Watch the scheduler that the engine really uses, whatever its class is."""
    wrapt.wrap_function_wrapper(module, "EngineCore.__init__", _after_init)


def _after_init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    watch.watch(instance.scheduler)
