# SPDX-License-Identifier: Apache-2.0
"""Did a run change from what a file says that it was?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from profilemate.contract.prompts import Prompt, best_shared, parting
from profilemate.contract.simulated import Run

FIGURES = ("hit_rate", "hit_tokens", "query_tokens", "evictions", "preemptions")
FOLDER = "kv_expected"
"""Beside the file with the tests."""


def figures(run: Run) -> dict[str, Any]:
    """What is kept of a run."""
    return {name: getattr(run, name) for name in FIGURES} | {"hits": list(run.hits)}


def write(path: Path, run: Run) -> None:
    """Keep what this run was."""
    path.parent.mkdir(exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(figures(run), indent=1) + "\n")
    scratch.replace(path)


def changes(
    was: Mapping[str, Any], run: Run, prompts: Sequence[Prompt], tolerance: float
) -> Iterator[str]:
    """A line for each figure that changed by more than the tolerance, a share of what it was (for
    the hit rate, points). Where there is one, also where the prompts part that find less."""
    now = figures(run)
    changed = [
        f"{name}: {_shown(was[name])} -> {_shown(now[name])} (tolerance {tolerance:g})"
        for name in FIGURES
        if abs(now[name] - was[name])
        > (tolerance if name == "hit_rate" else tolerance * abs(was[name]))
    ]
    if not changed:
        return
    yield from changed
    shared = best_shared(prompts)
    lost = [
        number
        for number, (before, after) in enumerate(zip(was["hits"], now["hits"], strict=False))
        if (after or 0) < (before or 0)
    ]
    for number in lost[:3]:
        found = f"prompt {number} found {was['hits'][number]:,} tokens, now {now['hits'][number]:,}"
        other = shared[number][1]
        yield found if other < 0 else f"{found}; {parting(prompts, other, number, run.block_size)}"
    if len(lost) > 3:
        yield f"{len(lost) - 3} more prompts find less"


def _shown(value: float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
