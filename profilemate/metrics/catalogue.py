# SPDX-License-Identifier: Apache-2.0
"""Which metrics there are, and where in ``totals.json`` their values come from.

Names and units are as Prometheus wants them: seconds, bytes, and ``_total`` behind counters. No
label holds what a client sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from profilemate.format.totals import (
    BANDS,
    RECORDING,
    Engine,
    Histogram,
    Lookups,
    Pool,
    RunTotals,
)

Kind = Literal["counter", "gauge", "histogram", "info"]
Value = float | Histogram
Sample = tuple[Sequence[str], Value]
"""The values of the labels, and that of the metric."""


@dataclass(frozen=True)
class Metric:
    """One metric. ``name`` has no ``_total`` or ``_info`` behind it. An info's labels are its
    value, which is always 1."""

    kind: Kind
    name: str
    about: str
    labels: tuple[str, ...]
    samples: Callable[[RunTotals], Iterable[Sample]]

    @property
    def shown(self) -> str:
        """The name by which a query knows it; of a histogram, what ``_bucket`` comes behind."""
        return self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")


def _engines(value: Callable[[Engine], Value]) -> Callable[[RunTotals], Iterator[Sample]]:
    """One value of each engine."""
    return lambda found: (((str(e["engine"]),), value(e)) for e in found["engines"])


def _pools(value: Callable[[Pool], Value]) -> Callable[[RunTotals], Iterator[Sample]]:
    """One value of each pool."""
    return lambda found: (
        ((str(engine["engine"]), str(pool["pool"])), value(pool))
        for engine in found["engines"]
        for pool in engine["pools"]
    )


def _states(found: RunTotals) -> Iterator[Sample]:
    for engine in found["engines"]:
        for pool in engine["pools"]:
            where = (str(engine["engine"]), str(pool["pool"]))
            yield (*where, "held"), pool["held_blocks"]
            yield (*where, "cached"), pool["cached_blocks"]
            yield (*where, "free"), pool["free_blocks"]


def _moves(found: RunTotals) -> Iterator[Sample]:
    for engine in found["engines"]:
        for pool in engine["pools"]:
            for moves in pool["groups"]:
                where = (str(engine["engine"]), str(pool["pool"]), str(moves["group"]))
                yield (*where, "allocate"), moves["allocated_blocks"]
                yield (*where, "reuse"), moves["reused_blocks"]
                yield (*where, "cache"), moves["cached_blocks"]
                yield (*where, "free"), moves["freed_blocks"]


def _evictions(
    key: Literal["blocks", "never_reused", "copies_left"],
) -> Callable[[RunTotals], Iterator[Sample]]:
    return lambda found: (
        (
            (
                str(engine["engine"]),
                str(pool["pool"]),
                str(evicted["group"]),
                evicted["reason"],
                evicted["origin"],
            ),
            evicted[key],
        )
        for engine in found["engines"]
        for pool in engine["pools"]
        for evicted in pool["evictions"]
    )


def _resets(found: RunTotals) -> Iterator[Sample]:
    for engine in found["engines"]:
        for pool in engine["pools"]:
            where = (str(engine["engine"]), str(pool["pool"]))
            yield (*where, "done"), pool["resets"]
            yield (*where, "refused"), pool["resets_refused"]


def _bands(found: RunTotals) -> Iterator[Sample]:
    for engine in found["engines"]:
        for pool in engine["pools"]:
            for band in BANDS:
                where = (str(engine["engine"]), str(pool["pool"]), band)
                yield where, pool["band_ns"][band] / 1e9


def _lookups(
    key: Literal["lookups", "query_tokens", "hit_tokens"],
) -> Callable[[RunTotals], Iterator[Sample]]:
    def samples(found: RunTotals) -> Iterator[Sample]:
        for engine in found["engines"]:
            prefix = engine["prefix_cache"]
            kinds: dict[str, Lookups] = {
                "fresh": prefix["fresh"],
                "resumed": prefix["resumed"],
                "skipped": prefix["skipped"],
            }
            for kind, sums in kinds.items():
                yield (str(engine["engine"]), kind), sums[key]

    return samples


def _finished(found: RunTotals) -> Iterator[Sample]:
    for engine in found["engines"]:
        for reason, count in engine["requests"]["finished"].items():
            yield (str(engine["engine"]), reason), count


def _tokens(found: RunTotals) -> Iterator[Sample]:
    for engine in found["engines"]:
        yield (str(engine["engine"]), "prompt"), engine["requests"]["prompt_tokens"]
        yield (str(engine["engine"]), "output"), engine["requests"]["output_tokens"]
        yield (str(engine["engine"]), "computed"), engine["requests"]["computed_tokens"]


def _steps(found: RunTotals) -> Iterator[Sample]:
    for engine in found["engines"]:
        steps, where = engine["steps"], str(engine["engine"])
        yield (where, "prefill"), steps["prefill"]
        yield (where, "mixed"), steps["mixed"]
        yield (where, "decode"), steps["decode"]
        yield (where, "idle"), steps["idle"]


def _scheduled(found: RunTotals) -> Iterator[Sample]:
    for engine in found["engines"]:
        yield (str(engine["engine"]), "prefill"), engine["steps"]["prefill_tokens"]
        yield (str(engine["engine"]), "decode"), engine["steps"]["decode_tokens"]


def _lost(found: RunTotals) -> Iterator[Sample]:
    for engine in found["engines"]:
        for part in engine["lost"]:
            yield (str(engine["engine"]), part), 1


def _executions(
    key: Literal["executions", "padded_tokens", "unpadded_tokens"],
) -> Callable[[RunTotals], Iterator[Sample]]:
    return lambda found: (
        (
            (
                str(worker["worker"]),
                executed["mode"],
                "yes" if executed["in_graph"] else "no",
                "yes" if executed["dummy"] else "no",
            ),
            executed[key],
        )
        for worker in found["workers"]
        for executed in worker["executions"]
    )


def _replays(found: RunTotals) -> Iterator[Sample]:
    for worker in found["workers"]:
        for replayed in worker["replays"]:
            where = (str(worker["worker"]), replayed["mode"], replayed["part"])
            yield (*where, "no"), replayed["replays"] - replayed["dummy"]
            yield (*where, "yes"), replayed["dummy"]


def _launches(found: RunTotals) -> Iterator[Sample]:
    for worker in found["workers"]:
        for replayed in worker["replays"]:
            where = (str(worker["worker"]), replayed["mode"], replayed["part"])
            yield where, replayed["launch_ns"] / 1e9


def _gpu_memory(found: RunTotals) -> Iterator[Sample]:
    for gpu in found["gpus"]:
        yield (str(gpu["gpu"]), "used"), gpu["used_bytes"]
        yield (str(gpu["gpu"]), "free"), gpu["free_bytes"]


def _gpu_utilization(found: RunTotals) -> Iterator[Sample]:
    for gpu in found["gpus"]:
        if gpu["utilization_pct"] is not None:
            yield (str(gpu["gpu"]),), gpu["utilization_pct"] / 100


def _processes(
    key: Literal[
        "dropped_events", "mismatches", "hook_ns", "writing_ns", "writes", "journal_bytes"
    ],
    unit: float = 1,
) -> Callable[[RunTotals], Iterator[Sample]]:
    return lambda found: (
        ((process["role"], str(process["rank"])), process[key] / unit if unit > 1 else process[key])
        for process in found["processes"]
    )


def _recording(found: RunTotals) -> Iterator[Sample]:
    for process in found["processes"]:
        for state in RECORDING:
            # A file of before there was such a key may be served.
            is_so = process.get("recording") == state
            yield (process["role"], str(process["rank"]), state), int(is_so)


def _lag(key: Literal["lag_ns", "longest_lag_ns"]) -> Callable[[RunTotals], Iterator[Sample]]:
    def samples(found: RunTotals) -> Iterator[Sample]:
        lag = found["collector"][key]
        if lag is not None:
            yield (), lag / 1e9

    return samples


def _info(found: RunTotals) -> Iterator[Sample]:
    versions = found["versions"]
    yield (
        (
            found["session_id"],
            versions.get("vllm") or "",
            versions.get("profilemate") or "",
        ),
        1,
    )


def _began(found: RunTotals) -> float:
    return datetime.fromisoformat(found["started_at"].replace("Z", "+00:00")).timestamp()


_ENGINE = ("engine",)
_POOL = ("engine", "pool")
_GROUP = (*_POOL, "group")
_EVICTED = (*_GROUP, "reason", "origin")
_EXECUTED = ("worker", "mode", "graph", "dummy")
_PROCESS = ("role", "rank")

METRICS: tuple[Metric, ...] = (
    Metric(
        "info",
        "profilemate_session",
        "The session that is recorded.",
        ("session_id", "vllm_version", "profilemate_version"),
        _info,
    ),
    Metric(
        "gauge",
        "profilemate_session_start_time_seconds",
        "When second 0 of the session was, in seconds since 1970.",
        (),
        lambda found: [((), _began(found))],
    ),
    Metric(
        "gauge",
        "profilemate_last_event_time_seconds",
        "When the last event was that is counted, in seconds since 1970.",
        (),
        lambda found: [((), _began(found) + found["until_ns"] / 1e9)],
    ),
    Metric(
        "gauge",
        "profilemate_session_ended",
        "1: every process has gone, and all that it wrote is counted.",
        (),
        lambda found: [((), int(found["ended"]))],
    ),
    # The KV cache.
    Metric(
        "gauge",
        "profilemate_kv_cache_blocks",
        "Blocks that requests hold, that are cached, and that are free.",
        (*_POOL, "state"),
        _states,
    ),
    Metric(
        "gauge",
        "profilemate_kv_cache_capacity_blocks",
        "Blocks of the pool, without the null block.",
        _POOL,
        _pools(lambda pool: pool["total_blocks"]),
    ),
    Metric(
        "gauge",
        "profilemate_kv_cache_peak_held_blocks",
        "The most blocks that requests held at once.",
        _POOL,
        _pools(lambda pool: pool["peak_held_blocks"]),
    ),
    Metric(
        "counter",
        "profilemate_kv_cache_usage_band_seconds",
        "How long the pool's usage was in each band, in percent.",
        (*_POOL, "band"),
        _bands,
    ),
    Metric(
        "counter",
        "profilemate_kv_cache_moved_blocks",
        "Blocks that were allocated, reused, cached and freed.",
        (*_GROUP, "event"),
        _moves,
    ),
    Metric(
        "counter",
        "profilemate_kv_cache_evictions",
        "Cached blocks that lost their content.",
        _EVICTED,
        _evictions("blocks"),
    ),
    Metric(
        "counter",
        "profilemate_kv_cache_never_reused_evictions",
        "Cached blocks that lost their content and that no request had found.",
        _EVICTED,
        _evictions("never_reused"),
    ),
    Metric(
        "counter",
        "profilemate_kv_cache_duplicate_evictions",
        "Cached blocks that lost a content which another block still had.",
        _EVICTED,
        _evictions("copies_left"),
    ),
    Metric(
        "counter",
        "profilemate_kv_cache_regretted_evictions",
        "Contents that were computed again after the pool had lost them, as their room was needed.",
        _POOL,
        _pools(lambda pool: pool["regretted_blocks"]),
    ),
    Metric(
        "counter",
        "profilemate_kv_cache_resets",
        "Resets of the prefix cache that were done, and that vLLM refused.",
        (*_POOL, "outcome"),
        _resets,
    ),
    Metric(
        "histogram",
        "profilemate_kv_cache_block_lifetime_seconds",
        "From the allocation of an evicted block to its eviction.",
        _ENGINE,
        _engines(lambda engine: engine["blocks"]["lifetime"]),
    ),
    Metric(
        "histogram",
        "profilemate_kv_cache_block_idle_seconds",
        "From the last allocation or reuse of an evicted block to its eviction.",
        _ENGINE,
        _engines(lambda engine: engine["blocks"]["idle"]),
    ),
    Metric(
        "histogram",
        "profilemate_kv_cache_block_evictable_seconds",
        "From the moment that nobody held an evicted block any more to its eviction.",
        _ENGINE,
        _engines(lambda engine: engine["blocks"]["evictable"]),
    ),
    Metric(
        "histogram",
        "profilemate_kv_cache_block_reuse_gap_seconds",
        "From the last allocation or reuse of a block to its next reuse.",
        _ENGINE,
        _engines(lambda engine: engine["blocks"]["reuse_gap"]),
    ),
    Metric(
        "histogram",
        "profilemate_kv_cache_block_reuses",
        "How often an evicted block had been reused.",
        _ENGINE,
        _engines(lambda engine: engine["blocks"]["reuses"]),
    ),
    # The prefix cache.
    Metric(
        "counter",
        "profilemate_prefix_cache_requests",
        "Admitted requests that looked their prompts up.",
        _ENGINE,
        _engines(lambda engine: engine["prefix_cache"]["requests"]),
    ),
    Metric(
        "counter",
        "profilemate_prefix_cache_hit_requests",
        "Admitted requests that found any token.",
        _ENGINE,
        _engines(lambda engine: engine["prefix_cache"]["requests_hit"]),
    ),
    Metric(
        "counter",
        "profilemate_prefix_cache_query_tokens",
        "Tokens that admitted requests asked for, each request once.",
        _ENGINE,
        _engines(lambda engine: engine["prefix_cache"]["query_tokens"]),
    ),
    Metric(
        "counter",
        "profilemate_prefix_cache_hit_tokens",
        "Tokens of these that were found.",
        _ENGINE,
        _engines(lambda engine: engine["prefix_cache"]["hit_tokens"]),
    ),
    Metric(
        "counter",
        "profilemate_prefix_cache_external_hit_tokens",
        "Tokens that a KV connector found beyond these.",
        _ENGINE,
        _engines(lambda engine: engine["prefix_cache"]["external_hit_tokens"]),
    ),
    Metric(
        "counter",
        "profilemate_prefix_cache_lookups",
        "All lookups, those included that led to no admission.",
        (*_ENGINE, "kind"),
        _lookups("lookups"),
    ),
    Metric(
        "counter",
        "profilemate_prefix_cache_lookup_query_tokens",
        "Tokens that all lookups asked for.",
        (*_ENGINE, "kind"),
        _lookups("query_tokens"),
    ),
    Metric(
        "counter",
        "profilemate_prefix_cache_lookup_hit_tokens",
        "Tokens that all lookups found.",
        (*_ENGINE, "kind"),
        _lookups("hit_tokens"),
    ),
    # Requests and steps.
    Metric(
        "counter",
        "profilemate_requests_arrived",
        "Requests that arrived.",
        _ENGINE,
        _engines(lambda engine: engine["requests"]["arrived"]),
    ),
    Metric(
        "counter",
        "profilemate_requests_finished",
        "Requests that ended, by reason.",
        (*_ENGINE, "reason"),
        _finished,
    ),
    Metric(
        "counter",
        "profilemate_requests_preempted",
        "Preemptions.",
        _ENGINE,
        _engines(lambda engine: engine["requests"]["preemptions"]),
    ),
    Metric(
        "gauge",
        "profilemate_requests_running",
        "Requests that run.",
        _ENGINE,
        _engines(lambda engine: engine["requests"]["running"]),
    ),
    Metric(
        "gauge",
        "profilemate_requests_waiting",
        "Requests that wait.",
        _ENGINE,
        _engines(lambda engine: engine["requests"]["waiting"]),
    ),
    Metric(
        "counter",
        "profilemate_request_tokens",
        "Tokens of prompts and answers, and tokens in the KV cache, of requests that ended.",
        (*_ENGINE, "kind"),
        _tokens,
    ),
    Metric(
        "histogram",
        "profilemate_request_queue_seconds",
        "From a request's arrival to its admission.",
        _ENGINE,
        _engines(lambda engine: engine["requests"]["queue"]),
    ),
    Metric(
        "histogram",
        "profilemate_request_first_token_seconds",
        "From a request's arrival to its first token, in the engine.",
        _ENGINE,
        _engines(lambda engine: engine["requests"]["first_token"]),
    ),
    Metric(
        "histogram",
        "profilemate_request_duration_seconds",
        "From a request's arrival to its end, in the engine.",
        _ENGINE,
        _engines(lambda engine: engine["requests"]["duration"]),
    ),
    Metric(
        "counter",
        "profilemate_scheduler_steps",
        "Steps with tokens of prompts alone, of both, of answers alone, and without any.",
        (*_ENGINE, "kind"),
        _steps,
    ),
    Metric(
        "counter",
        "profilemate_scheduler_tokens",
        "Tokens that were scheduled, of prompts and of answers.",
        (*_ENGINE, "kind"),
        _scheduled,
    ),
    Metric(
        "counter",
        "profilemate_scheduler_requests",
        "Requests that had tokens in a step, added up over the steps.",
        _ENGINE,
        _engines(lambda engine: engine["steps"]["scheduled_requests"]),
    ),
    Metric(
        "histogram",
        "profilemate_scheduler_schedule_seconds",
        "How long schedule() took in steps that scheduled tokens.",
        _ENGINE,
        _engines(lambda engine: engine["steps"]["schedule"]),
    ),
    # Workers and GPUs.
    Metric(
        "counter",
        "profilemate_cuda_graph_executions",
        "Executions of the model, in a graph or without.",
        _EXECUTED,
        _executions("executions"),
    ),
    Metric(
        "counter",
        "profilemate_cuda_graph_padded_tokens",
        "Tokens that were computed, padding included.",
        _EXECUTED,
        _executions("padded_tokens"),
    ),
    Metric(
        "counter",
        "profilemate_cuda_graph_unpadded_tokens",
        "Tokens that were asked for.",
        _EXECUTED,
        _executions("unpadded_tokens"),
    ),
    Metric(
        "counter",
        "profilemate_cuda_graph_replays",
        "Replays of graphs.",
        ("worker", "mode", "part", "dummy"),
        _replays,
    ),
    Metric(
        "counter",
        "profilemate_cuda_graph_launch_seconds",
        "The host's time in these replays.",
        ("worker", "mode", "part"),
        _launches,
    ),
    Metric(
        "gauge",
        "profilemate_gpu_memory_bytes",
        "Memory of the GPU that is used, by whichever process, and free.",
        ("gpu", "state"),
        _gpu_memory,
    ),
    Metric(
        "gauge",
        "profilemate_gpu_utilization_ratio",
        "The share of the time in which anything ran on the GPU.",
        ("gpu",),
        _gpu_utilization,
    ),
    # Recorder and collector.
    Metric(
        "gauge",
        "profilemate_recording_lost",
        "1: this part of the recording ended early; its figures end there.",
        (*_ENGINE, "part"),
        _lost,
    ),
    Metric(
        "gauge",
        "profilemate_recorder_state",
        "1: the recording is in this state: on, paused, stopped early, or its process has gone.",
        (*_PROCESS, "state"),
        _recording,
    ),
    Metric(
        "counter",
        "profilemate_recorder_dropped_events",
        "Events that could not be written.",
        _PROCESS,
        _processes("dropped_events"),
    ),
    Metric(
        "counter",
        "profilemate_recorder_mismatches",
        "Times that the rebuilt state disagreed with the pool's own count.",
        _PROCESS,
        _processes("mismatches"),
    ),
    Metric(
        "counter",
        "profilemate_recorder_hook_seconds",
        "Time that hooks took at the ends of steps.",
        _PROCESS,
        _processes("hook_ns", 1e9),
    ),
    Metric(
        "counter",
        "profilemate_recorder_writing_seconds",
        "Processor time of the thread that packs and writes.",
        _PROCESS,
        _processes("writing_ns", 1e9),
    ),
    Metric(
        "counter",
        "profilemate_recorder_writes",
        "Writes to the journal.",
        _PROCESS,
        _processes("writes"),
    ),
    Metric(
        "counter",
        "profilemate_recorder_journal_bytes",
        "Bytes that were written to the journal.",
        _PROCESS,
        _processes("journal_bytes"),
    ),
    Metric(
        "gauge",
        "profilemate_collector_lag_seconds",
        "From the oldest event of the collector's last round to its table.",
        (),
        _lag("lag_ns"),
    ),
    Metric(
        "gauge",
        "profilemate_collector_longest_lag_seconds",
        "The longest such time so far.",
        (),
        _lag("longest_lag_ns"),
    ),
    Metric(
        "counter",
        "profilemate_collector_table_bytes",
        "Bytes that were written to the tables.",
        (),
        lambda found: [((), found["collector"]["table_bytes"])],
    ),
)
