# SPDX-License-Identifier: Apache-2.0
"""What is each release's scheduler put through?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.vllm_matrix import adapt


def _nothing(scheduler: Any, step: int = 0) -> None:
    """For cases in which nothing comes between the steps."""


@dataclass(frozen=True)
class Case:
    """One workload: requests of the trace, all there at once, on a pool too small for them.

    ``title`` says what it is about, ``after_step`` what else happens after a step, ``at_end``
    after the last one.
    """

    title: str
    build: Callable[[Path], Any]
    requests: int = 300
    after_step: Callable[[Any, int], None] = _nothing
    at_end: Callable[[Any], None] = _nothing


BLOCKS = 150


def _plain(model: Path) -> Any:
    return adapt.build_scheduler(model, BLOCKS)


def _without_cache(model: Path) -> Any:
    return adapt.build_scheduler(model, BLOCKS, enable_prefix_caching=False)


def _chunked(model: Path) -> Any:
    return adapt.build_scheduler(model, BLOCKS // 2, max_num_batched_tokens=128)


CASES = {
    "plain": Case("prefix caching on", _plain),
    "uncached": Case("prefix caching off", _without_cache),
}
