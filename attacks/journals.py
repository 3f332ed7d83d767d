# SPDX-License-Identifier: Apache-2.0
"""Damage journals of real schedulers and workers, and complete their sessions.

Bytes are damaged as disks and careless hands do it: cut, flipped, zeroed, written twice, swapped,
lost, put into another journal. And frames are forged, whose checksum is right: numbers, counts,
ops, JSON. Each damaged session is completed as ``profilemate finalize`` does it. It must be what it
was, or a beginning of it where its end was cut off, or say that it is not; and whatever is in its
tables must be possible.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import io
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks.figure import Figure
from attacks.journals_damage import DAMAGES, FORGERIES, Journal, frames_of, without_status
from attacks.journals_samples import Sample, make_samples
from profilemate import collector
from profilemate.collector.tables import COLUMNS
from profilemate.format.errors import SessionError

HANG_SEC = 20
HUGE_BYTES = 2 << 30
LIMIT_BYTES = 6 << 30
EXPLAINED = 8
"""So many faults are printed."""

PROGRESS_SEC = 20

Tables = dict[str, bytes]


class HangError(BaseException):
    """It took too long. Nothing that catches errors catches this."""


@dataclass(frozen=True)
class Known:
    """A sample, its tables, and by journal the tables of each beginning that ends with a frame."""

    sample: Sample
    tables: Tables
    beginnings: dict[str, list[Tables]]


@dataclass(frozen=True)
class Outcome:
    """What became of a damaged session: its tables and metadata, or how it failed."""

    tables: Tables
    metadata: dict[str, Any]
    error: str = ""


def run(count: int, seed: int, folder: Path) -> list[Figure]:
    """Damage and complete ``count`` sessions."""
    samples = make_samples(folder)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    with _in_memory(folder) as place:
        return attack(samples, count, seed, place)


def attack(samples: list[Sample], count: int, seed: int, folder: Path) -> list[Figure]:
    """Damage these samples, and complete them."""
    known = [_known(sample, folder) for sample in samples]
    others = [journal for each in known for journal in each.sample.journals.values()]
    counts: collections.Counter[str] = collections.Counter()
    explained = 0
    slowest, next_report, began = 0.0, time.monotonic() + PROGRESS_SEC, time.monotonic()
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        each = chance.choice(known)
        name = chance.choice(sorted(each.sample.journals))
        data, ways = damage(each.sample.journals[name], others, chance)
        what = f"{name}: {', '.join(ways)}"
        before = time.monotonic()
        outcome = complete(each.sample, {**each.sample.journals, name: data}, folder)
        slowest = max(slowest, time.monotonic() - before)
        fault = judge(each, name, data, ways, outcome)
        counts["complete"] += bool(outcome.metadata.get("complete"))
        counts["refused"] += outcome.error.startswith("SessionError")
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > HUGE_BYTES:
            print(f"{number}: {each.sample.name}: {what}: more than 2 GB")
            counts["huge"] += 1
            break
        if fault:
            kind, text = fault
            counts[kind] += 1
            explained += 1
            if explained <= EXPLAINED:
                print(f"{number}: {each.sample.name}: {what}: {kind}: {text}", flush=True)
        counts["tried"] += 1
        if time.monotonic() > next_report:
            next_report = time.monotonic() + PROGRESS_SEC
            rate = counts["tried"] / (time.monotonic() - began)
            print(
                f"{counts['tried']:,} of {count:,}, {rate:.0f} a second, {dict(counts)}", flush=True
            )
    return [
        Figure("damaged sessions", counts["tried"]),
        Figure("of them complete", counts["complete"]),
        Figure("of them not completed, for a reason", counts["refused"]),
        Figure("unexpected exceptions", counts["exception"], most=0),
        Figure(f"hangs of more than {HANG_SEC} s", counts["hang"], most=0),
        Figure("over 2 GB of memory", counts["huge"], most=0),
        Figure("changed, and accepted without a word", counts["silent"], most=0),
        Figure("rows that cannot be", counts["impossible"], most=0),
        Figure("the slowest", slowest, "s", most=HANG_SEC),
    ]


def damage(data: bytes, others: list[bytes], chance: random.Random) -> tuple[bytes, list[str]]:
    """A journal's bytes damaged, and in which ways."""
    possible = FORGERIES if chance.random() < 0.5 else DAMAGES
    ways = chance.choices(possible, k=1 if chance.random() < 0.8 else chance.randrange(2, 5))
    for way in ways:
        data = way(Journal(data, others), chance)
    return data, [way.__name__ for way in ways]


def complete(sample: Sample, journals: dict[str, bytes], folder: Path) -> Outcome:
    """Complete a session that has these journals."""
    session = folder / "session"
    shutil.rmtree(session, ignore_errors=True)
    (session / "journal").mkdir(parents=True)
    (session / "journal" / "session.json").write_bytes(sample.founding)
    for name, data in journals.items():
        path = session / "journal" / name
        path.write_bytes(data)
        # Older than a journal that has only just begun.
        os.utime(path, (1_700_000_000, 1_700_000_000))
    try:
        with _alarm():
            collector.finalize(session)
    except SessionError as error:
        return Outcome({}, {}, f"SessionError: {error}")
    except HangError:
        return Outcome({}, {}, "hang")
    except Exception:
        return Outcome({}, {}, traceback.format_exc())
    return Outcome(_tables_in(session), json.loads((session / "metadata.json").read_bytes()))


def judge(
    known: Known, journal: str, data: bytes, ways: list[str], outcome: Outcome
) -> tuple[str, str] | None:
    """The kind of fault that this is, and what it is; None: all is as it should be."""
    if outcome.error == "hang":
        return "hang", ""
    if outcome.error:
        is_refused = outcome.error.startswith("SessionError")
        return None if is_refused else ("exception", outcome.error)
    if outcome.tables == known.tables:
        return None
    is_forged = any(way.startswith("forge") for way in ways)
    # Behind a gap nobody can tell whose the frames are, as long as they follow each other.
    may_be_more = is_forged or "end_as_another" in ways
    impossible = "" if may_be_more else _more_than(outcome.tables, known.tables)
    impossible = impossible or what_cannot_be(outcome.tables)
    if impossible:
        return "impossible", f"{impossible} {_problems(outcome)}"
    # Where frames are forged, other numbers that could have been are there without a word.
    if is_forged or not outcome.metadata["complete"]:
        return None
    if any(outcome.tables == tables for tables in _torn(known, journal, data)):
        return None
    return "silent", _difference(outcome.tables, known.tables)


def _torn(known: Known, journal: str, data: bytes) -> Iterator[Tables]:
    """The tables that this journal may make without a word: behind a beginning of the whole one it
    has less than two frames, as the end of a longer frame may be. A status that is missing, or
    elsewhere, changes no table."""
    whole = known.sample.journals[journal]
    bounds = [0, *(end for _, end in frames_of(whole)), len(whole) + 1]
    ends = zip(bounds[:-2], bounds[2:], known.beginnings[journal], strict=True)
    told = without_status(data)
    for begin, end, tables in ends:
        beginning = without_status(whole[:begin])
        if told.startswith(beginning) and len(told) - len(beginning) < end - begin:
            yield tables


def what_cannot_be(tables: Tables) -> str:
    """A row that no engine can have led to; empty where there is none."""
    for name, data in tables.items():
        if COLUMNS[name] is None:
            rows = [json.loads(line) for line in data.decode().splitlines()]
        else:
            text = io.StringIO(data.decode(), newline="")
            rows = list(csv.DictReader(text, strict=True))
        for row in rows:
            if None in row or (None in row.values() and COLUMNS[name] is not None):
                return f"{name}: cells are missing in {row}"
            wrong = _CHECKS[name](row)
            if wrong:
                return f"{name}: {wrong} in {row}"
    return ""


def _usage(row: dict[str, str]) -> str:
    parts = sum(int(row[name]) for name in ("num_blocks", "cached_blocks", "free_blocks"))
    least = min(int(row[name]) for name in ("num_blocks", "cached_blocks", "free_blocks"))
    return "" if parts == int(row["total_blocks"]) and least >= 0 else "blocks do not add up"


def _eviction(row: dict[str, str]) -> str:
    idle, lived = float(row["idle_sec"]), float(row["lifetime_sec"])
    if not 0 <= idle <= lived <= float(row["timestamp_sec"]) + 1e-6:
        return "times do not fit"
    return "" if 0 <= float(row["evictable_sec"] or 0) <= lived else "evictable before it lived"


def _lookup(row: dict[str, str]) -> str:
    return "" if 0 <= int(row["hit_tokens"]) <= int(row["query_tokens"]) else "more hits than asked"


def _step(row: dict[str, str]) -> str:
    tokens, prefill = int(row["scheduled_tokens"]), int(row["prefill_tokens"])
    decode, took = int(row["decode_tokens"]), int(row["schedule_us"])
    return "" if prefill + decode == tokens and min(prefill, decode, took) >= 0 else "no such step"


def _request(row: dict[str, Any]) -> str:
    times = [row["timestamp"], row["queue_sec"] or 0, row["finish_sec"]]
    return "" if min(times) >= 0 and row["finish_sec"] * 1e3 + 1 >= row["timestamp"] else "times"


def _timed(row: dict[str, str]) -> str:
    least = min(
        float(cell) for name, cell in row.items() if name.endswith(("_sec", "_us")) and cell
    )
    return "" if least >= 0 else "a negative time"


_CHECKS: dict[str, Callable[[dict[str, Any]], str]] = {
    "kv_cache_usage.csv": _usage,
    "kv_cache_allocations.csv": _timed,
    "kv_cache_evictions.csv": _eviction,
    "prefix_cache_lookups.csv": _lookup,
    "scheduler_steps.csv": _step,
    "requests.jsonl": _request,
    "cuda_graph_captures.csv": _timed,
    "cuda_graph_usage.csv": _timed,
    "cuda_graph_timeline.csv": _timed,
}


def _more_than(tables: Tables, known: Tables) -> str:
    for name, data in tables.items():
        count, most = _count(name, data), _count(name, known.get(name, b""))
        if count > most:
            return f"{name}: {count:,} in place of {most:,}"
    return ""


def _count(name: str, data: bytes) -> int:
    """Rows; of the steps, how many there were."""
    if name != "scheduler_steps.csv":
        return data.count(b"\n")
    return sum(int(row["repeats"]) for row in csv.DictReader(io.StringIO(data.decode())))


def _difference(tables: Tables, known: Tables) -> str:
    return ", ".join(
        f"{name}: {_count(name, tables.get(name, b''))} of {_count(name, known.get(name, b''))}"
        for name in sorted({*tables, *known})
        if tables.get(name) != known.get(name)
    )


def _problems(outcome: Outcome) -> list[str]:
    return [str(process["problem"]) for process in outcome.metadata["processes"]]


def _known(sample: Sample, folder: Path) -> Known:
    whole = complete(sample, sample.journals, folder)
    assert whole.metadata["complete"], (sample.name, whole)
    beginnings: dict[str, list[Tables]] = {}
    for name, data in sample.journals.items():
        ends = [0, *(end for _, end in frames_of(data))][:-1]
        cut = [complete(sample, {**sample.journals, name: data[:end]}, folder) for end in ends]
        assert all(outcome.metadata["complete"] for outcome in cut), sample.name
        beginnings[name] = [outcome.tables for outcome in cut]
    return Known(sample, whole.tables, beginnings)


def _tables_in(session: Path) -> Tables:
    paths = [session / name for name in COLUMNS]
    return {path.name: path.read_bytes() for path in paths if path.exists()}


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def late(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, HANG_SEC)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _in_memory(folder: Path) -> Iterator[Path]:
    """A folder that no disk is behind, where there is one: it is written many times a second."""
    memory = Path("/dev/shm")
    is_there = os.access(memory, os.W_OK)
    with tempfile.TemporaryDirectory(dir=memory if is_there else folder) as place:
        yield Path(place)
