# SPDX-License-Identifier: Apache-2.0
"""Waits for ``vllm.v1.engine.core``, to watch schedulers that do not derive from vLLM's, too."""

from __future__ import annotations

from typing import Any

import wrapt

from profilemate.hooks.kv import watch


def attach(module: Any) -> None:
    """Watch the scheduler that the engine really uses, whatever its class."""
    wrapt.wrap_function_wrapper(module, "EngineCore.__init__", _after_init)


def _after_init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    watch.watch(instance.scheduler)
