# SPDX-License-Identifier: Apache-2.0
"""The tables of a session, as the analyzer reads them: names, columns, types.

The columns stand in the order of the files. A newer profilemate may append columns, which this one
skips. ``docs/tables.md`` says what each column means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import polars as pl

from analysis.tables.rules import RULES

FORMAT_VERSION = 1
"""The version of the session format that this analyzer reads."""


_LONGEST_CSV_LINE = 1 << 20
"""A row is short but for its request ids, which no server takes in such lengths."""
_LONGEST_JSON_LINE = 32 << 20
"""The contents of a prompt of 10 million tokens, in blocks of 16, are a third of it."""
LONGEST_SEC = 1e10
"""No session lasts so long: a later time is damage."""
PRECISION_SEC = 1e-6
"""The tables have microseconds."""
MOST_TOKENS = 100_000_000
"""No model takes a longer prompt, gives a longer answer, or has larger blocks."""
_MOST = 2**31 - 1
"""Larger counts in one row are damage, and larger numbers of blocks, engines, pools, groups."""
_MOST_BYTES = 2**50
"""More memory is damage."""
_OF_A_REQUEST = frozenset(
    (
        *("input_length", "output_length", "block_size", "query_tokens", "hit_tokens"),
        *("external_hit_tokens", "computed_tokens"),
    )
)
"""Counts of one request's tokens."""
_MOST_OF_A_RUN = 2**53
_OF_A_RUN = frozenset(
    (
        *("routed_tokens", "pair_tokens", "expected_tokens", "expert_tokens"),
        "other_expert_tokens",
    )
)
"""Tokens of a worker's whole run."""
_NAMES = frozenset(("content_id", "priority", "step", "tenant"))
"""Whole numbers without bounds: they only name things, or put them in order."""

_SECONDS = pl.Float64
_COUNT = pl.Int64
_NUMBER = pl.Int64
_TEXT = pl.String
_IDS = pl.List(pl.Int64)


@dataclass(frozen=True)
class Table:
    """One file of a session. ``columns``: types by name. ``required``: columns never empty."""

    name: str
    file: str
    columns: Mapping[str, type[pl.DataType] | pl.DataType]
    required: tuple[str, ...]
    time: str = "timestamp_sec"
    time_unit: float = 1.0
    """The column that says when, and how many seconds its unit has."""
    in_order: tuple[str, ...] = ()
    """Rows that are alike in these columns are in the order of time. The analyzer relies on it."""
    in_order_where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By column, the values of the rows that are in that order; empty for all rows."""
    rising: str = ""
    """A number that is larger in each such row than in the one before; empty where none is."""

    @property
    def is_csv(self) -> bool:
        return self.file.endswith(".csv")

    @property
    def longest_line(self) -> int:
        """Bytes of a line at most, its end included. A longer one is damage."""
        return _LONGEST_CSV_LINE if self.is_csv else _LONGEST_JSON_LINE

    @property
    def lists(self) -> frozenset[str]:
        """The columns that hold a list in each row."""
        return frozenset(name for name, kind in self.columns.items() if kind == _IDS)

    @cached_property
    def checked(self) -> tuple[str, ...]:
        """The columns that show whether a row is sound and in order."""
        order = (*self.in_order, *self.in_order_where)
        ruled = (name for rule in RULES[self.name] for name in rule.columns)
        names = {self.time, *self.required, *self.bounds, *order, *ruled}
        return tuple(name for name in self.columns if name in names)

    @cached_property
    def bounds(self) -> Mapping[str, tuple[float, float]]:
        """The lowest and the highest value that makes sense, for each column that has bounds."""
        longest = LONGEST_SEC / self.time_unit
        # Clocks may make a duration a little less than 0.
        spans = {
            name: (0, 100) if name.endswith("_pct") else (-longest, longest)
            for name, kind in self.columns.items()
            if kind == pl.Float64
        }
        counts = {
            name: (0, _most(name))
            for name, kind in self.columns.items()
            if kind == pl.Int64 and name not in _NAMES
        }
        of_a_run = {name: (0, _MOST_OF_A_RUN) for name in self.columns if name in _OF_A_RUN}
        return {**spans, self.time: (0, longest), **counts, **of_a_run}


def _most(name: str) -> int:
    """The largest whole number that makes sense in a column of this name."""
    if name.endswith("_bytes"):
        return _MOST_BYTES
    return MOST_TOKENS if name in _OF_A_REQUEST else _MOST


def _csv(
    name: str,
    columns: Mapping[str, type[pl.DataType]],
    *required: str,
    time: str = "timestamp_sec",
    in_order: tuple[str, ...] = (),
    in_order_where: Mapping[str, tuple[str, ...]] | None = None,
    rising: str = "",
) -> Table:
    where = in_order_where or {}
    return Table(name, f"{name}.csv", columns, required, time, 1.0, in_order, where, rising)


_DESCRIPTOR = {
    "runtime_mode": _TEXT,
    "num_tokens": _COUNT,
    "num_reqs": _COUNT,
    "uniform": _COUNT,
    "has_lora": _COUNT,
}
"""The batch descriptor, by which vLLM chooses a graph."""


_ALL = (
    _csv(
        "kv_cache_usage",
        {
            "timestamp_sec": _SECONDS,
            "usage_pct": pl.Float64,
            "num_blocks": _COUNT,
            "total_blocks": _COUNT,
            "cached_blocks": _COUNT,
            "free_blocks": _COUNT,
            "running_reqs": _COUNT,
            "waiting_reqs": _COUNT,
            "engine": _NUMBER,
            "pool": _NUMBER,
        },
        "timestamp_sec",
        "usage_pct",
        "num_blocks",
        "total_blocks",
        "cached_blocks",
        "free_blocks",
        "engine",
        "pool",
        in_order=("engine", "pool"),
    ),
    _csv(
        "kv_cache_allocations",
        {
            "timestamp_sec": _SECONDS,
            "event": _TEXT,
            "num_blocks": _COUNT,
            "request_id": _TEXT,
            "evicted_blocks": _COUNT,
            "step": _NUMBER,
            "engine": _NUMBER,
            "pool": _NUMBER,
            "group": _NUMBER,
        },
        "timestamp_sec",
        "event",
        "engine",
        in_order=("engine",),
    ),
    _csv(
        "kv_cache_evictions",
        {
            "timestamp_sec": _SECONDS,
            "lifetime_sec": _SECONDS,
            "idle_sec": _SECONDS,
            "evictable_sec": _SECONDS,
            "block_id": _NUMBER,
            "reuse_count": _COUNT,
            "reason": _TEXT,
            "content_id": _NUMBER,
            "copies_left": _COUNT,
            "origin": _TEXT,
            "owner_request": _TEXT,
            "evicting_request": _TEXT,
            "engine": _NUMBER,
            "pool": _NUMBER,
            "group": _NUMBER,
        },
        "timestamp_sec",
        "reason",
        "engine",
        in_order=("engine",),
    ),
    _csv(
        "prefix_cache_lookups",
        {
            "timestamp_sec": _SECONDS,
            "request_id": _TEXT,
            "query_tokens": _COUNT,
            "hit_tokens": _COUNT,
            "external_hit_tokens": _COUNT,
            "kind": _TEXT,
            "admitted": _COUNT,
            "lookups": _COUNT,
            "engine": _NUMBER,
        },
        "timestamp_sec",
        "query_tokens",
        "hit_tokens",
        "kind",
        "lookups",
        "engine",
        # A row of refused lookups is written when they end and has the time at which they began. A
        # step records resumed requests after all others.
        in_order=("engine",),
        in_order_where={"admitted": ("1",), "kind": ("first", "retry")},
    ),
    _csv(
        "scheduler_steps",
        {
            "timestamp_sec": _SECONDS,
            "step": _NUMBER,
            "running_reqs": _COUNT,
            "waiting_reqs": _COUNT,
            "scheduled_tokens": _COUNT,
            "prefill_tokens": _COUNT,
            "decode_tokens": _COUNT,
            "scheduled_reqs": _COUNT,
            "preempted_reqs": _COUNT,
            "finished_reqs": _COUNT,
            "schedule_us": pl.Float64,
            "repeats": _COUNT,
            "engine": _NUMBER,
            "encoder_items": _COUNT,
            "encoder_tokens": _COUNT,
        },
        "timestamp_sec",
        "engine",
        in_order=("engine",),
        rising="step",
    ),
    _csv(
        "cuda_graph_captures",
        {
            **_DESCRIPTOR,
            "capture_time_sec": _SECONDS,
            "duration_sec": _SECONDS,
            "num_graphs": _COUNT,
            "memory_bytes": _COUNT,
            "source": _TEXT,
            "kind": _TEXT,
            "worker": _NUMBER,
            "part": _TEXT,
        },
        "capture_time_sec",
        "kind",
        "worker",
        time="capture_time_sec",
    ),
    _csv(
        "cuda_graph_usage",
        {
            **_DESCRIPTOR,
            "replay_count": _COUNT,
            "total_launch_sec": _SECONDS,
            "total_gpu_sec": _SECONDS,
            "worker": _NUMBER,
            "num_graphs": _COUNT,
            "source": _TEXT,
            "part": _TEXT,
            "dummy_count": _COUNT,
            "capture_time_sec": _SECONDS,
        },
        "replay_count",
        "worker",
        time="capture_time_sec",
    ),
    _csv(
        "cuda_graph_timeline",
        {
            "timestamp_sec": _SECONDS,
            **_DESCRIPTOR,
            "unpadded_tokens": _COUNT,
            "launch_us": pl.Float64,
            "gpu_us": pl.Float64,
            "dummy": _COUNT,
            "worker": _NUMBER,
            "num_graphs": _COUNT,
        },
        "timestamp_sec",
        "runtime_mode",
        "num_tokens",
        "unpadded_tokens",
        "dummy",
        "worker",
    ),
    _csv(
        "gpu_memory",
        {
            "timestamp_sec": _SECONDS,
            "gpu": _NUMBER,
            "used_bytes": _COUNT,
            "free_bytes": _COUNT,
            "utilization_pct": pl.Float64,
        },
        "timestamp_sec",
        "gpu",
        "used_bytes",
        "free_bytes",
    ),
    _csv(
        "gpu_steps",
        {
            "timestamp_sec": _SECONDS,
            "worker": _NUMBER,
            "prefill_tokens": _COUNT,
            "decode_tokens": _COUNT,
            "prefill_reqs": _COUNT,
            "decode_reqs": _COUNT,
            "gpu_us": pl.Float64,
            "encoder_items": _COUNT,
            "encoder_us": pl.Float64,
        },
        "timestamp_sec",
        "worker",
        "prefill_tokens",
        "decode_tokens",
        in_order=("worker",),
    ),
    _csv(
        "moe_experts",
        {
            "timestamp_sec": _SECONDS,
            "since_sec": _SECONDS,
            "worker": _NUMBER,
            "layer": _NUMBER,
            "tokens": _COUNT,
            "by_expert": _TEXT,
            "by_rank": _TEXT,
        },
        "timestamp_sec",
        "since_sec",
        "worker",
        "layer",
        "tokens",
        "by_expert",
        in_order=("worker", "layer"),
    ),
    _csv(
        "moe_pairs",
        {
            "timestamp_sec": _SECONDS,
            "worker": _NUMBER,
            "layer": _NUMBER,
            "expert": _NUMBER,
            "other_expert": _NUMBER,
            "routed_tokens": _COUNT,
            "pair_tokens": _COUNT,
            "expected_tokens": pl.Float64,
            "expert_tokens": _COUNT,
            "other_expert_tokens": _COUNT,
        },
        "timestamp_sec",
        "worker",
        "layer",
        "expert",
        "other_expert",
        "routed_tokens",
        "pair_tokens",
        "expected_tokens",
        "expert_tokens",
        "other_expert_tokens",
        in_order=("worker", "layer"),
    ),
    Table(
        "requests",
        "requests.jsonl",
        {
            "timestamp": pl.Float64,
            "input_length": _COUNT,
            "output_length": _COUNT,
            "hash_ids": _IDS,
            "block_size": _COUNT,
            "request_id": _TEXT,
            "engine": _NUMBER,
            "output_hash_ids": _IDS,
            "hit_tokens": _COUNT,
            "external_hit_tokens": _COUNT,
            "preemptions": _COUNT,
            "num_blocks": _COUNT,
            "queue_sec": _SECONDS,
            "first_token_sec": _SECONDS,
            "finish_sec": _SECONDS,
            "finish_reason": _TEXT,
            "computed_tokens": _COUNT,
            "prefix_ids": _IDS,
            "lora": _TEXT,
            "tenant": _NUMBER,
            "priority": _NUMBER,
            "api_server": _NUMBER,
            "bare_hash_ids": _IDS,
            "draft_tokens": _COUNT,
            "accepted_tokens": _COUNT,
            "trace_id": _TEXT,
            "parent_span_id": _TEXT,
        },
        (),
        time="timestamp",
        time_unit=1e-3,
    ),
)

TABLES: Mapping[str, Table] = {table.name: table for table in _ALL}
