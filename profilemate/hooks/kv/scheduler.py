# SPDX-License-Identifier: Apache-2.0
"""Waits for ``vllm.v1.core.sched.scheduler``, and watches every Scheduler that is made."""

from __future__ import annotations

from typing import Any

import wrapt

from profilemate.hooks.kv import watch


def attach(module: Any) -> None:
    """Watch each scheduler as soon as it is made, before it hands out any block."""
    wrapt.wrap_function_wrapper(module, "Scheduler.__init__", _after_init)


def _after_init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    watch.watch(instance)
