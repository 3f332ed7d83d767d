# SPDX-License-Identifier: Apache-2.0
"""Counts kept inside vLLM's block pool by an application of the user's, not by profilemate.

The methods of the class are replaced before the engine is made. Times come from the same clock
that profilemate uses, but are taken here.
"""

import os
import time
from collections import Counter
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler


class Counts:
    """What one engine's pool did. Blocks, and seconds from ``time.monotonic``."""

    def __init__(self) -> None:
        self.blocks: Counter[str] = Counter()
        self.lifetimes: list[float] = []
        self.idle_times: list[float] = []
        self.preemptions = 0
        self._allocated: dict[int, float] = {}
        self._accessed: dict[int, float] = {}

    def lost(self, block_id: int, now: float) -> None:
        self.blocks["evicted"] += 1
        self.lifetimes.append(now - self._allocated[block_id])
        self.idle_times.append(now - self._accessed[block_id])

    def taken(self, block_id: int, now: float) -> None:
        self._allocated[block_id] = self._accessed[block_id] = now

    def touched(self, block_id: int, now: float) -> None:
        self.blocks["reused"] += 1
        self._accessed[block_id] = now

    def result(self) -> dict[str, Any]:
        mean_lifetime, mean_idle = (
            sum(times) / len(times) if times else 0.0 for times in (self.lifetimes, self.idle_times)
        )
        return {
            **self.blocks,
            "mean_lifetime": mean_lifetime,
            "mean_idle": mean_idle,
            "preemptions": self.preemptions,
        }


def count() -> Counts:
    """Count from now on what all block pools of this process do."""
    counts = Counts()
    get_new_blocks, touch = BlockPool.get_new_blocks, BlockPool.touch
    free_blocks, reset = BlockPool.free_blocks, BlockPool.reset_prefix_cache
    preempt = Scheduler._preempt_request

    def counted_get(pool: Any, num_blocks: int) -> Any:
        cached = [block.block_id for block in pool.blocks if block.block_hash is not None]
        blocks = get_new_blocks(pool, num_blocks)
        now = time.monotonic()
        for block in blocks:
            if block.block_id in cached:
                counts.lost(block.block_id, now)
            counts.taken(block.block_id, now)
        counts.blocks["allocated"] += len(blocks)
        return blocks

    def counted_touch(pool: Any, blocks: Any) -> None:
        touch(pool, blocks)
        for block in blocks:
            counts.touched(block.block_id, time.monotonic())

    def counted_free(pool: Any, ordered_blocks: Any) -> None:
        blocks = list(ordered_blocks)
        free_blocks(pool, blocks)
        counts.blocks["freed"] += sum(block.ref_cnt == 0 for block in blocks)

    def counted_reset(pool: Any) -> bool:
        cached = [block.block_id for block in pool.blocks if block.block_hash is not None]
        done = bool(reset(pool))
        now = time.monotonic()
        for block_id in cached if done else ():
            counts.lost(block_id, now)
        return done

    def counted_preempt(*args: Any, **kwargs: Any) -> None:
        counts.preemptions += 1
        preempt(*args, **kwargs)

    BlockPool.get_new_blocks, BlockPool.touch = counted_get, counted_touch
    BlockPool.free_blocks, BlockPool.reset_prefix_cache = counted_free, counted_reset
    Scheduler._preempt_request = counted_preempt
    return counts


def log_steps(path: str) -> None:
    """From now on, add a byte to this file for each step whose results have been processed."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    update = Scheduler.update_from_output

    def logged(*args: Any, **kwargs: Any) -> Any:
        result = update(*args, **kwargs)
        os.write(fd, b".")
        return result

    Scheduler.update_from_output = logged
