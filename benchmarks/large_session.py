# SPDX-License-Identifier: Apache-2.0
"""A generated session of any size: all tables, which fit each other, the same every time.

Requests come one after another. Each has 60 blocks of prompt, of which the first 40 are those of
its family, and 40 blocks of answer, so it takes 100 blocks, and evicts as many of an earlier one.
Every second request finds its family's blocks; the others come after they have been evicted.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from tests.analysis.builder import COLUMNS, METADATA, SessionBuilder

SECONDS = 3_600.0
BLOCK = 16
SHARED, PROMPT, BLOCKS = 40, 60, 100
POOL_BLOCKS = 20_000
ASKED = 20
"""Requests of a family."""
_BACK = POOL_BLOCKS // BLOCKS
"""The requests after which a request's blocks are evicted."""
_CHUNK = 5_000


def write(folder: Path, evictions: int) -> None:
    """Write a session of so many evictions, and about as many rows of allocations."""
    requests = evictions // BLOCKS
    SessionBuilder(folder).metadata(
        cache={**METADATA["cache"], "blocks": POOL_BLOCKS + 1, "max_model_len": 8_192},
        prefix_lengths=[BLOCK * (number + 1) for number in range(64)],
        content_ids_shared=True,
        started_at="2026-01-31T12:00:00.000000Z",
        ended_at="2026-01-31T13:00:00.000000Z",
    )
    with ExitStack() as files:
        tables = {name: files.enter_context(open(folder / name, "wb")) for name in COLUMNS}
        lines = files.enter_context(open(folder / "requests.jsonl", "wb"))
        for name, file in tables.items():
            file.write(f"{COLUMNS[name]}\n".encode())
        for first in range(0, requests, _CHUNK):
            part = _Part(np.arange(first, min(first + _CHUNK, requests)), requests)
            for name, values in part.tables().items():
                columns = COLUMNS[name].split(",")
                frame = pl.DataFrame(values).sort("timestamp_sec", maintain_order=True)
                frame.select(
                    pl.col(column) if column in frame.columns else pl.lit(None).alias(column)
                    for column in columns
                ).write_csv(tables[name], include_header=False, float_precision=6)
            part.requests().write_ndjson(lines)


class _Part:
    """Some of the requests, by their numbers, of ``count``."""

    def __init__(self, numbers: np.ndarray, count: int) -> None:
        self.numbers = numbers
        self.names = _names(numbers)
        self.spacing = SECONDS / count
        self.begin = numbers * self.spacing
        self.families = numbers % max(1, count // ASKED)
        self.found = numbers % 2 == 1

    def contents(self, numbers: np.ndarray, families: np.ndarray) -> np.ndarray:
        """Content ids of the blocks of these requests, a row each."""
        shared = _content(families[:, None] * SHARED + np.arange(SHARED), 1)
        own = _content(numbers[:, None] * BLOCKS + np.arange(SHARED, BLOCKS), 2)
        return np.hstack([shared, own])

    def requests(self) -> pl.DataFrame:
        """Rows of requests.jsonl."""
        ids = self.contents(self.numbers, self.families)
        prompt, output = PROMPT * BLOCK + 2, (BLOCKS - PROMPT) * BLOCK
        count = len(self.numbers)
        return pl.DataFrame(
            {
                "timestamp": self.begin * 1e3,
                "input_length": np.full(count, prompt),
                "output_length": np.full(count, output),
                "hash_ids": np.hstack([ids[:, :PROMPT], (1 << 40) + self.numbers[:, None]]),
                "block_size": np.full(count, BLOCK),
                "request_id": self.names,
                "engine": np.zeros(count, np.int64),
                "output_hash_ids": ids[:, PROMPT:],
                "hit_tokens": self.found * SHARED * BLOCK,
                "external_hit_tokens": np.zeros(count, np.int64),
                "preemptions": np.zeros(count, np.int64),
                "num_blocks": np.full(count, BLOCKS),
                "queue_sec": np.full(count, 0.001),
                "first_token_sec": self.begin + 0.2 * self.spacing,
                "finish_sec": self.begin + 0.9 * self.spacing,
                "finish_reason": ["stop"] * count,
                "prefix_ids": ids[:, :PROMPT],
                "computed_tokens": np.full(count, prompt + output - 1),
            }
        )

    def tables(self) -> dict[str, dict[str, Any]]:
        """Rows of the CSV tables, by column."""
        return {
            "kv_cache_usage.csv": self._usage(),
            "kv_cache_allocations.csv": self._allocations(),
            "kv_cache_evictions.csv": self._evictions(),
            "prefix_cache_lookups.csv": self._lookups(),
            "scheduler_steps.csv": self._steps(),
        }

    def _at(self, share: float | np.ndarray) -> np.ndarray:
        return np.add.outer(self.begin, np.atleast_1d(share) * self.spacing).ravel()

    def _usage(self) -> dict[str, Any]:
        moments = np.linspace(0.1, 0.9, 10)
        held = np.tile((np.arange(10) * 10 + 9) % 100, len(self.numbers))
        return {
            "timestamp_sec": self._at(moments),
            "usage_pct": 100 * held / POOL_BLOCKS,
            "num_blocks": held,
            "total_blocks": np.full(len(held), POOL_BLOCKS),
            "cached_blocks": POOL_BLOCKS - held,
            "free_blocks": np.zeros(len(held), np.int64),
            "running_reqs": np.minimum(held, 1),
            "waiting_reqs": np.zeros(len(held), np.int64),
            **_of_engine(len(held)),
        }

    def _allocations(self) -> dict[str, Any]:
        answers = BLOCKS - PROMPT
        events = ["allocate", "cache"] * (1 + answers) + ["free"]
        blocks = [PROMPT, PROMPT] + [1, 1] * answers + [BLOCKS]
        moments = np.concatenate([[0.1, 0.1], np.repeat(np.linspace(0.3, 0.85, answers), 2), [0.9]])
        evicted = [
            count if event == "allocate" else 0 for event, count in zip(events, blocks, strict=True)
        ]
        count = len(self.numbers)
        return {
            "timestamp_sec": self._at(moments),
            "event": events * count,
            "num_blocks": np.tile(blocks, count),
            "request_id": np.repeat(self.names, len(events)),
            "evicted_blocks": np.tile(evicted, count),
            "step": np.repeat(self.numbers * 10 + 1, len(events)),
            "group": np.zeros(count * len(events), np.int64),
            **_of_engine(count * len(events)),
        }

    def _evictions(self) -> dict[str, Any]:
        victims = self.numbers - _BACK
        families = victims % (int(self.families.max()) + 1)
        moments = np.concatenate([np.full(PROMPT, 0.1), np.linspace(0.3, 0.85, BLOCKS - PROMPT)])
        count = len(self.numbers) * BLOCKS
        lifetime = _BACK * self.spacing * (1 + (np.arange(count) % 97) / 97)
        place = np.tile(np.arange(BLOCKS), len(self.numbers))
        return {
            "timestamp_sec": self._at(moments),
            "lifetime_sec": lifetime,
            "idle_sec": lifetime * 0.9,
            "evictable_sec": lifetime * 0.8,
            "block_id": (np.repeat(self.numbers, BLOCKS) % _BACK) * BLOCKS + place + 1,
            "reuse_count": np.where(place < SHARED, np.arange(count) % 3, 0),
            "reason": ["reallocated"] * count,
            "content_id": self.contents(victims, families).ravel(),
            "copies_left": (np.arange(count) % 20 == 0).astype(np.int64),
            "origin": np.where(place < PROMPT, "prompt", "output"),
            "owner_request": np.repeat(_names(victims), BLOCKS),
            "evicting_request": np.repeat(self.names, BLOCKS),
            "group": np.zeros(count, np.int64),
            **_of_engine(count),
        }

    def _lookups(self) -> dict[str, Any]:
        count = len(self.numbers)
        return {
            "timestamp_sec": self._at(0.05),
            "request_id": self.names,
            "query_tokens": np.full(count, PROMPT * BLOCK + 2),
            "hit_tokens": self.found * SHARED * BLOCK,
            "external_hit_tokens": np.zeros(count, np.int64),
            "kind": ["first"] * count,
            "admitted": np.ones(count, np.int64),
            "lookups": np.ones(count, np.int64),
            "engine": np.zeros(count, np.int64),
        }

    def _steps(self) -> dict[str, Any]:
        moments = np.linspace(0.1, 0.9, 10)
        count = len(self.numbers) * 10
        first = np.tile(np.arange(10) == 0, len(self.numbers))
        return {
            "timestamp_sec": self._at(moments),
            "step": (np.repeat(self.numbers, 10) * 10 + np.tile(np.arange(10), count // 10)) + 1,
            "running_reqs": np.ones(count, np.int64),
            "waiting_reqs": np.zeros(count, np.int64),
            "scheduled_tokens": np.where(first, PROMPT * BLOCK + 2, 64),
            "prefill_tokens": np.where(first, PROMPT * BLOCK + 2, 0),
            "decode_tokens": np.where(first, 0, 64),
            "scheduled_reqs": np.ones(count, np.int64),
            "preempted_reqs": np.zeros(count, np.int64),
            "finished_reqs": np.zeros(count, np.int64),
            "schedule_us": 100.0 + np.arange(count) % 50,
            "repeats": np.ones(count, np.int64),
            "engine": np.zeros(count, np.int64),
        }


def _names(numbers: np.ndarray) -> np.ndarray:
    return np.array([f"cmpl-{number:08x}{number * 7919 % 2**32:08x}" for number in numbers])


def _content(numbers: np.ndarray, kind: int) -> np.ndarray:
    """Numbers spread over the 53 bits of a content id."""
    mixed = (numbers.astype(np.uint64) * np.uint64(4) + np.uint64(kind)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    ids: np.ndarray = (mixed >> np.uint64(11)).astype(np.int64)
    return ids


def _of_engine(count: int) -> dict[str, Any]:
    return {"engine": np.zeros(count, np.int64), "pool": np.zeros(count, np.int64)}
