# SPDX-License-Identifier: Apache-2.0
"""``totals.json``: the figures of a whole run, exact whatever became of its tables.

The collector counts them while it applies events, and writes the file once a second. Tables may be
bounded, and then lack what is old. These figures never do. ``docs/totals.md`` describes each key.

Every figure is a whole number. What ends in ``_ns`` are nanoseconds: durations, or times since
second 0 of the session. The tables round the same times to microseconds. Numbers have as many
digits as it takes: a sum of nanoseconds may be longer than 64 bits.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, TypedDict, cast

from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder
from profilemate.format.shape import fault

TOTALS_FILE = "totals.json"
FORMAT_VERSION = 1
MAX_BYTES = 16 << 20

_DIGITS = (1, 2, 5)

TIMES_NS = tuple(digit * 10**power for power in range(6, 15) for digit in _DIGITS)
"""Bounds of the histograms of times: 1, 2 and 5 times the powers of ten from 1 ms to 500,000 s.

They are those of ``analysis.stats.histograms``, so the whole run can be laid over any window of it.
One step is at most a factor of 2.5, and 27 of them reach from a token to a week."""

SCHEDULE_NS = tuple(digit * 10**power for power in range(4, 10) for digit in _DIGITS)
"""Bounds for the time that ``schedule()`` takes: in the same steps from 10 µs to 5 s."""

REUSES = (1, 2, 4, 8, 16, 32, 64)
"""Bounds for the times that a block was reused: as the rows of the analyzer's table of them."""

BANDS = ("under_40", "from_40_to_60", "from_60_to_80", "from_80_to_90", "over_90")
"""Bands of usage in percent, as ``analysis.pool.usage.Bands``. 90 % itself is not over 90 %."""


class Histogram(TypedDict):
    """How values are spread. ``sum`` and ``count`` are exact.

    ``counts[0]`` lie below ``bounds[0]``, ``counts[n]`` from ``bounds[n - 1]`` on and below
    ``bounds[n]``, and the last ones from the last bound on. Bounds and sum are nanoseconds for
    times, and numbers of reuses for reuses.
    """

    bounds: list[int]
    counts: list[int]
    count: int
    sum: int


class Moves(TypedDict):
    """Blocks of one KV cache group that were moved, by event."""

    group: int
    allocated_blocks: int
    reused_blocks: int
    cached_blocks: int
    freed_blocks: int


class Evictions(TypedDict):
    """Cached blocks that lost their content, by group, reason and origin.

    ``never_reused``: those that no request had found. ``copies_left``: those whose content another
    block still had.
    """

    group: int
    reason: str
    origin: str
    blocks: int
    never_reused: int
    copies_left: int


class Pool(TypedDict):
    """One block pool. Held, cached and free blocks are as of its last change.

    ``regretted_blocks``: contents that got into a block again after their last copy had been
    evicted as its room was needed. Of each group as many such contents are remembered as the pool
    has blocks, the last ones; a reset forgets them.
    ``band_ns``: how long its usage was in each of ``BANDS``, from its first state to the session's
    last event.
    """

    pool: int
    total_blocks: int
    held_blocks: int
    cached_blocks: int
    free_blocks: int
    peak_held_blocks: int
    band_ns: dict[str, int]
    regretted_blocks: int
    resets: int
    resets_refused: int
    groups: list[Moves]
    evictions: list[Evictions]


class BlockTimes(TypedDict):
    """``lifetime``, ``idle``, ``evictable`` and ``reuses`` of every eviction, as the columns of
    kv_cache_evictions.csv. ``reuse_gap``: of every block that a request found, the time since its
    last allocation or reuse; without the blocks that resumed requests found again."""

    lifetime: Histogram
    idle: Histogram
    evictable: Histogram
    reuse_gap: Histogram
    reuses: Histogram


class Lookups(TypedDict):
    """Lookups, the tokens that they asked for, and those that they found."""

    lookups: int
    query_tokens: int
    hit_tokens: int


class PrefixCache(TypedDict):
    """``requests`` to ``external_hit_tokens``: the lookup that counts for each admitted request,
    which is the analyzer's true hit rate. ``fresh``: every lookup of requests that had not been
    preempted, those that led to no admission included. ``resumed``: after a preemption.
    ``skipped``: of requests that must not read the cache."""

    requests: int
    requests_hit: int
    query_tokens: int
    hit_tokens: int
    external_requests_hit: int
    external_hit_tokens: int
    fresh: Lookups
    resumed: Lookups
    skipped: Lookups


class Requests(TypedDict):
    """``arrived``, ``preemptions``, ``running`` and ``waiting``: of all requests, the last two as
    of the last step. All else: of those that ended, as in requests.jsonl."""

    arrived: int
    running: int
    waiting: int
    preemptions: int
    finished: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    queue: Histogram
    first_token: Histogram
    duration: Histogram


class Steps(TypedDict):
    """Steps with tokens of prompts alone, of both, of answers alone, and steps that scheduled
    nothing (``idle``, repeated ones included). ``schedule``: how long ``schedule()`` took, without
    the idle ones."""

    prefill: int
    mixed: int
    decode: int
    idle: int
    prefill_tokens: int
    decode_tokens: int
    scheduled_requests: int
    schedule: Histogram


class Engine(TypedDict):
    """One data-parallel engine. ``lost``: the parts of its recording that ended early, whose
    figures end there, too."""

    engine: int
    lost: list[str]
    pools: list[Pool]
    blocks: BlockTimes
    prefix_cache: PrefixCache
    requests: Requests
    steps: Steps


class Executions(TypedDict):
    """Executions of the model that are alike in mode, in whether they replayed a graph, and in
    whether they served no request (``dummy``)."""

    mode: str
    in_graph: bool
    dummy: bool
    executions: int
    padded_tokens: int
    unpadded_tokens: int


class Replays(TypedDict):
    """Replays of graphs of one mode, as in cuda_graph_usage.csv; ``dummy``: of these, in executions
    that served no request."""

    mode: str
    part: str
    replays: int
    dummy: int
    launch_ns: int


class Experts(TypedDict):
    """One MoE layer's ``routed_tokens``, and those of each of its experts, as in
    moe_experts.csv."""

    layer: int
    routed_tokens: int
    by_expert: list[int]


class _Worker(TypedDict):
    worker: int
    executions: list[Executions]
    replays: list[Replays]


class Worker(_Worker, total=False):
    """One worker. ``experts`` came later than the others: older files lack it."""

    experts: list[Experts]


class Gpu(TypedDict):
    """The last sample of a GPU, as the last row of it in gpu_memory.csv."""

    gpu: int
    sampled_sec: float
    used_bytes: int
    free_bytes: int
    utilization_pct: int | None


RECORDING = ("on", "paused", "stopped", "ended")
"""How the recording of a process stands: it goes on, the user has it stand still, it ended before
the process did, or the process has gone."""


class _Process(TypedDict):
    role: str
    rank: int
    dropped_events: int
    mismatches: int
    hook_ns: int
    writing_ns: int
    writes: int
    journal_bytes: int


class Process(_Process, total=False):
    """What recording cost a process of vLLM's, and whether all of it arrived. ``role`` is
    ``engine`` or ``worker``. ``recording`` is one of ``RECORDING``; ``paused_since_ns`` says since
    when it is paused. Both came later than the others: older files lack them."""

    recording: str
    paused_since_ns: int | None


class Collector(TypedDict):
    """``lag_ns``: from the oldest event of the last round to its table, 0 where there was none.
    ``longest_lag_ns``: the longest so far. Both are null where the tables were made afterwards."""

    lag_ns: int | None
    longest_lag_ns: int | None
    table_bytes: int


class RunTotals(TypedDict):
    """All of ``totals.json``.

    ``until_ns``: time of the last event that is counted. ``ended``: every process has gone, and all
    that it wrote is counted. ``peak_held_blocks``: of all pools together.
    """

    format_version: int
    session_id: str
    started_at: str
    until_ns: int
    ended: bool
    versions: dict[str, str]
    peak_held_blocks: int
    engines: list[Engine]
    workers: list[Worker]
    gpus: list[Gpu]
    processes: list[Process]
    collector: Collector


class NewerTotalsError(SessionError):
    """A newer profilemate wrote the file."""


def read(folder: Folder) -> RunTotals:
    """The totals of the session in this folder.

    Raises:
        SessionError: it has none, they cannot be read, are damaged, or are of another version.

    """
    path = folder.path / TOTALS_FILE
    try:
        info = folder.stat(TOTALS_FILE)
        if info is None:
            raise SessionError(
                f"{folder.path} has no {TOTALS_FILE}: it was recorded by an older profilemate, or "
                "its collector has not begun"
            )
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_BYTES:
            raise SessionError(f"{path} is no file of less than {MAX_BYTES >> 20} MiB")
        content = folder.read(TOTALS_FILE)
    except OSError as error:
        raise SessionError(f"cannot read {path}: {error.strerror}") from None
    return checked(content, path)


def checked(content: bytes, path: Path) -> RunTotals:
    """The totals in this content of the file. Whoever reads the file reads it so.

    Every key is there, and each figure is of its kind; a histogram's counts fit its bounds.

    Raises:
        NewerTotalsError: a newer profilemate wrote it.
        SessionError: it is damaged.

    """
    if len(content) > MAX_BYTES:
        raise _damaged(path, f"it is larger than {MAX_BYTES >> 20} MiB")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise _damaged(path, "it is not JSON") from None
    version = found.get("format_version") if isinstance(found, dict) else None
    if type(version) is int and version > FORMAT_VERSION:
        raise NewerTotalsError(
            f"{path} has format version {version}; this profilemate reads {FORMAT_VERSION}: use "
            "the one that recorded it"
        )
    wrong = fault(found, RunTotals) or _odd_histogram(found)
    if wrong is None and version != FORMAT_VERSION:
        wrong = f"format_version is {version}"
    if wrong is not None:
        raise _damaged(path, wrong)
    return cast(RunTotals, found)


def _odd_histogram(found: Any, where: str = "") -> str | None:
    """Which histogram's counts do not fit its bounds; None where all do."""
    if isinstance(found, list):
        inner = [(f"{where}[{number}]", each) for number, each in enumerate(found)]
    elif not isinstance(found, dict):
        return None
    elif "bounds" in found:
        bounds, counts = found["bounds"], found["counts"]
        is_sound = len(counts) == len(bounds) + 1 and bounds == sorted(bounds)
        return None if is_sound else f"{where}.counts do not fit its bounds"
    else:
        inner = [(f"{where}.{name}".lstrip("."), each) for name, each in found.items()]
    return next(filter(None, (_odd_histogram(each, place) for place, each in inner)), None)


def _damaged(path: Path, what: str) -> SessionError:
    return SessionError(f"{path} is damaged: {what}; restore the recorded file, or remove it")
