# SPDX-License-Identifier: Apache-2.0
"""Who makes a plan's KV cache groups: the installed vLLM, or profilemate's own arithmetic?"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from profilemate.config import SWITCH
from profilemate.messages import say

if TYPE_CHECKING:
    from analysis.plan.groups import Grouping, Layout
    from analysis.plan.specs import Stage


def grouping(*, without_vllm: bool) -> Grouping:
    """What makes the groups. Where vLLM fails, one line says so and the arithmetic makes them."""
    from analysis.plan.groups import group

    if without_vllm or importlib.util.find_spec("vllm") is None:
        return group
    from profilemate.simulation import groups as vllm_groups

    # This process imports vLLM and serves nobody, so there is nothing to record.
    os.environ[SWITCH] = "0"
    failed = False

    def by_vllm(stages: Sequence[Stage]) -> Layout:
        nonlocal failed
        if not failed:
            try:
                return vllm_groups.group(stages)
            except vllm_groups.NoVllmError as error:
                failed = True
                say(f"planning without vLLM: {error}")
        return group(stages)

    return by_vllm
