# SPDX-License-Identifier: Apache-2.0
"""Plan models whose config.json has odd values: each is planned, or refused in one line."""

from __future__ import annotations

import logging
import resource
import time
from collections import Counter
from pathlib import Path
from random import Random

from analysis.plan.groups import group
from attacks.figure import Figure
from profilemate.commands.plan_groups import grouping, installed
from tests.plan import odd

BY_VLLM = 20
"""Every so many-th plan has its groups from the installed vLLM."""


def run(count: int, seed: int, folder: Path) -> list[Figure]:
    """Plan ``count`` models."""
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    logging.disable(logging.WARNING)
    # vLLM is imported before the clock runs.
    vllm = installed(without_vllm=False)
    vllms = grouping(vllm)
    odd.outcome(odd.plain(), odd.Settings(), vllms)
    for number in range(count):
        random = Random(f"{seed} {number}")
        entries, settings = odd.entries(random), odd.settings(random)
        made_by = group if number % BY_VLLM else grouping(vllm)
        began = time.process_time()
        try:
            found = odd.outcome(entries, settings, made_by)
            outcomes["planned" if found == "planned" else "refused"] += 1
        except Exception as error:
            outcomes["broken"] += 1
            print(f"{number}: {type(error).__name__}: {str(error)[:200]}")
        slowest = max(slowest, time.process_time() - began)
        if number % 5_000 == 0:
            print(f"{number:,} of {count:,}: {dict(outcomes)}")
    mebibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [
        Figure("planned", outcomes["planned"]),
        Figure("refused in one line", outcomes["refused"]),
        Figure("other errors", outcomes["broken"], most=0),
        Figure("slowest, processor time", slowest, "s", most=30),
        Figure("memory at the peak", mebibytes, "MiB", most=4096),
    ]
