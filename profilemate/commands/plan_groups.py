# SPDX-License-Identifier: Apache-2.0
"""Who makes a plan's KV cache groups: the installed vLLM, or profilemate's own arithmetic?"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profilemate.config import SWITCH
from profilemate.messages import say

if TYPE_CHECKING:
    from analysis.plan.groups import Grouping, Layout
    from analysis.plan.specs import Stage


@dataclass
class Vllm:
    """``is_usable``: vLLM is installed, is to be asked, and has not failed yet."""

    is_usable: bool


def installed(*, without_vllm: bool) -> Vllm:
    """vLLM as it is here. ``without_vllm``: the user wants none."""
    return Vllm(not without_vllm and importlib.util.find_spec("vllm") is not None)


def grouping(vllm: Vllm) -> Grouping:
    """What makes the groups. Where vLLM fails, one line says so and the arithmetic makes them."""
    from analysis.plan.groups import group

    if not vllm.is_usable:
        return group
    from profilemate.simulation import groups as vllm_groups

    # This process imports vLLM and serves nobody, so there is nothing to record.
    os.environ[SWITCH] = "0"

    def by_vllm(stages: Sequence[Stage]) -> Layout:
        if vllm.is_usable:
            try:
                return vllm_groups.group(stages)
            except vllm_groups.NoVllmError as error:
                vllm.is_usable = False
                say(f"planning without vLLM: {error}")
        return group(stages)

    return by_vllm
