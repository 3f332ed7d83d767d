# SPDX-License-Identifier: Apache-2.0
"""Watch a session: what there is to show of it, look after look."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from analysis.errors import SessionError
from analysis.tables.metadata import number, part, parts, text, whole
from analysis.tables.metadata import read as read_metadata
from analysis.tables.owner import another
from profilemate.live import rates, recording
from profilemate.live.disk import Disk, Measuring
from profilemate.live.holders import NO_STEP, NOT_SEEN, Holder, Ledger, why_not
from profilemate.live.prefixes import Hottest, Prefixes
from profilemate.live.reading import Engine, Gpu, Look, NoTotalsError, Pool, Process, look
from profilemate.live.tails import Row, last_rows
from profilemate.live.tails import whole as whole_cell
from profilemate.live.waiting import reason

RARELY_SEC = 10.0
"""How often the disk is measured and metadata.json read."""
SILENT_SEC = 15.0
"""A collector writes totals.json once a second. One that is silent for so long is likely gone."""

RUNNING, ENDED, SILENT, UNKNOWN = "running", "ended", "silent", "unknown"


@dataclass(frozen=True)
class EngineView:
    """One engine now.

    Blocks are as of its last change, requests as of its last step. ``paused_since_sec``: since when
    its recording is paused, in seconds of the session; None where it is not. Blocks are as of then,
    and how many requests run and wait is None. ``waits_for``: why, None where
    none waits or the last step does not tell. ``windows``: what it did in the last 10 s and in the
    last minute, as far as they were watched; the second one only where it is longer than the first.
    ``run``: since the session began.
    """

    engine: int
    usage_pct: float | None
    held_blocks: int
    cached_blocks: int
    free_blocks: int
    total_blocks: int
    peak_held_blocks: int
    pools: tuple[Pool, ...]
    paused_since_sec: float | None
    running: int | None
    waiting: int | None
    waits_for: str | None
    preemptions: int
    evictions: int
    requests_ended: int
    windows: tuple[rates.Figures, ...]
    run: rates.Figures
    lost: tuple[str, ...]


@dataclass(frozen=True)
class WorkerView:
    """A worker's executions in the longest window, and since the session began.
    ``expert_imbalance``: tokens of a layer's busiest expert, divided by the mean of its experts, on
    average over the layers, in that window; ``run_expert_imbalance`` since the session began. None
    where no expert was counted then."""

    worker: int
    window: rates.Graphs | None
    run: rates.Graphs
    expert_imbalance: float | None
    run_expert_imbalance: float | None


@dataclass(frozen=True)
class ProcessView:
    """What recording takes of a core in the longest window, in percent, and what went wrong."""

    role: str
    rank: int
    hooks_pct: float | None
    writing_pct: float | None
    dropped_events: int
    mismatches: int


@dataclass(frozen=True)
class SnapshotsView:
    """The snapshots that the collector took. ``last_name``, ``last_reason``: of the last one; None
    where there is none. ``left_out``: because of the limit. ``failed``: could not be taken."""

    taken: int
    last_name: str | None
    last_reason: str | None
    left_out: int
    failed: int


@dataclass(frozen=True)
class View:
    """One session now.

    ``state``: ``running``, ``ended``, ``silent`` (it has not ended, and nothing is written any
    more) or ``unknown`` (no figure has been read). ``notes``: what there is to say of that.
    ``age_sec``: since totals.json was written. ``behind_sec``: from an event to its table in the
    collector's last round. ``holders``: None where it is not certain who they are; then
    ``holders_note`` says why. ``hottest``: the prefixes that were found most in the last minute;
    None where no figure has been read. ``segments``: closed ones. ``window_begin_sec``: where the
    tables begin; None where nothing was removed from them. ``snapshots``: None where the collector
    was asked for none.
    """

    path: str
    session_id: str
    state: str
    notes: tuple[str, ...]
    model: str | None
    versions: Mapping[str, str]
    until_sec: float | None
    age_sec: float | None
    behind_sec: float | None
    longest_behind_sec: float | None
    engines: tuple[EngineView, ...]
    holders: tuple[Holder, ...] | None
    holders_note: str | None
    hottest: Hottest | None
    workers: tuple[WorkerView, ...]
    gpus: tuple[Gpu, ...]
    processes: tuple[ProcessView, ...]
    segments: int
    window_begin_sec: float | None
    snapshots: SnapshotsView | None
    disk: Disk | None


class Watcher:
    """Watches one session. ``view`` never raises: what is wrong is a note."""

    def __init__(self, session: Path) -> None:
        self.session = session
        self._history = rates.History()
        self._last: Look | None = None
        self._metadata: Mapping[str, Any] = {}
        self._problem: str | None = None
        self._next_rarely = 0.0
        self._disk: Disk | None = None
        self._measuring = Measuring(session)
        self._ledger = Ledger(session)
        self._prefixes = Prefixes(session)
        self._steps: dict[int, Row] = {}

    def close(self) -> None:
        """Let go of the session's files."""
        self._ledger.close()
        self._prefixes.close()

    def view(self) -> View:
        """Look at the session, and say how it is."""
        notes = self._look()
        found = self._last
        if found is None:
            return replace(_nothing(self.session), notes=tuple(notes))
        was_read = not notes
        self._read_rarely()
        if self._problem:
            notes.append(self._problem)
        notes += recording.notes(found.processes, self._metadata)
        lookups = self._follow_tables(found)
        age = max(0.0, time.time() - found.written_ns / 1e9)
        is_silent = age > SILENT_SEC or not was_read
        state = ENDED if found.ended else SILENT if is_silent else RUNNING
        if state == SILENT and was_read:
            notes.append(
                f"nothing new for {age:,.0f} s: the collector has ended, or the machine stands "
                "still; profilemate finalize completes a session that has ended"
            )
        windows = self._history.windows()
        self._prefixes.look(found.until_ns / 1e9)
        holders, holders_note = self._holders(found)
        return View(
            path=str(self.session),
            session_id=found.session_id,
            state=state,
            notes=tuple(notes),
            model=text(part(self._metadata, "model").get("name")),
            versions=found.versions,
            until_sec=found.until_ns / 1e9,
            age_sec=age,
            behind_sec=_seconds(found.lag_ns),
            longest_behind_sec=_seconds(found.longest_lag_ns),
            engines=tuple(
                _engine(each, found, windows, self._waits_for(each, lookups))
                for each in found.engines
            ),
            holders=holders,
            holders_note=holders_note,
            hottest=self._prefixes.hottest(),
            workers=tuple(_workers(found, windows)),
            gpus=found.gpus,
            processes=tuple(_process(each, windows) for each in found.processes),
            segments=whole(self._metadata.get("segments")) or 0,
            window_begin_sec=_window_begin(self._metadata),
            snapshots=_snapshots(self._metadata),
            disk=self._disk,
        )

    def _look(self) -> list[str]:
        """Take a look; returns what is wrong."""
        try:
            self._last = look(self.session)
        except NoTotalsError:
            return [self._without_totals()]
        except SessionError as error:
            return [str(error)]
        self._history.add(self._last)
        return []

    def _without_totals(self) -> str:
        if not self.session.is_dir():
            return "the session's folder is gone" + self._so_far()
        if self._last is not None:
            return "totals.json is gone" + self._so_far()
        return (
            "no totals.json yet: the collector has not begun, or an older profilemate records "
            "this session"
        )

    def _so_far(self) -> str:
        return "" if self._last is None else ": these are its last figures"

    def _read_rarely(self) -> None:
        if time.monotonic() < self._next_rarely:
            return
        self._next_rarely = time.monotonic() + RARELY_SEC
        self._disk = self._measuring.measure() if self.session.is_dir() else self._disk
        try:
            self._metadata = read_metadata(self.session) or self._metadata
            other = another(self.session)
            self._problem = None if other is None else f"this is a session of {other}'s"
        except (SessionError, OSError) as error:
            self._problem = str(error) if isinstance(error, SessionError) else None

    def _follow_tables(self, found: Look) -> dict[int, Row]:
        """Read the ends of the tables; returns the last lookups of engines where requests wait."""
        ranks = [engine.engine for engine in found.engines]
        self._steps.update(last_rows(self.session, "scheduler_steps", ranks))
        if self._why_no_holders(found) is None:
            self._ledger.look(self._steps)
        waiting = [rank for rank, step in self._steps.items() if whole_cell(step["waiting_reqs"])]
        return last_rows(self.session, "prefix_cache_lookups", waiting) if waiting else {}

    def _waits_for(self, engine: Engine, lookups: Mapping[int, Row]) -> str | None:
        step = self._steps.get(engine.engine)
        lookup = lookups.get(engine.engine)
        return reason(step, lookup, self._metadata) if engine.waiting else None

    def _why_no_holders(self, found: Look) -> str | None:
        return why_not(self._metadata, [lost for each in found.engines for lost in each.lost])

    def _holders(self, found: Look) -> tuple[tuple[Holder, ...] | None, str | None]:
        why = self._why_no_holders(found)
        if why is not None:
            return None, why
        if not self._steps:
            return None, NO_STEP
        holders = self._ledger.holders()
        return holders, NOT_SEEN if holders is None else None


def _engine(
    engine: Engine, last: Look, windows: list[tuple[Look, Look]], waits_for: str | None
) -> EngineView:
    paused = recording.paused_since(last.processes, engine.engine)
    total = sum(pool.total for pool in engine.pools)
    held = sum(pool.held for pool in engine.pools)
    seen = [rates.between(first, now, engine.engine) for first, now in windows]
    return EngineView(
        engine=engine.engine,
        usage_pct=100 * held / total if total else None,
        held_blocks=held,
        cached_blocks=sum(pool.cached for pool in engine.pools),
        free_blocks=sum(pool.free for pool in engine.pools),
        total_blocks=total,
        peak_held_blocks=sum(pool.peak_held for pool in engine.pools),
        pools=engine.pools if len(engine.pools) > 1 else (),
        paused_since_sec=paused,
        running=engine.running if paused is None else None,
        waiting=engine.waiting if paused is None else None,
        waits_for=waits_for,
        preemptions=engine.counters.preemptions,
        evictions=engine.counters.evictions,
        requests_ended=engine.counters.ended,
        windows=tuple(figures for figures in seen if figures is not None),
        run=rates.of_run(last, engine),
        lost=engine.lost,
    )


def _workers(last: Look, windows: list[tuple[Look, Look]]) -> list[WorkerView]:
    first = windows[-1][0] if windows else None
    return [
        WorkerView(
            worker=worker.worker,
            window=rates.graphs_between(first, last, worker) if first else None,
            run=rates.graphs_between(None, last, worker),
            expert_imbalance=rates.imbalance_between(first, worker) if first else None,
            run_expert_imbalance=rates.imbalance_between(None, worker),
        )
        for worker in last.workers
    ]


def _process(process: Process, windows: list[tuple[Look, Look]]) -> ProcessView:
    cost = rates.cost_between(*windows[-1], process) if windows else None
    return ProcessView(
        role=process.role,
        rank=process.rank,
        hooks_pct=cost.hooks_pct if cost else None,
        writing_pct=cost.writing_pct if cost else None,
        dropped_events=process.dropped_events,
        mismatches=process.mismatches,
    )


def _window_begin(metadata: Mapping[str, Any]) -> float | None:
    return number(part(metadata, "window").get("begin_sec"))


def _snapshots(metadata: Mapping[str, Any]) -> SnapshotsView | None:
    said = part(metadata, "snapshots")
    if not said:
        return None
    taken = parts(said, "taken")
    last = taken[-1] if taken else {}
    return SnapshotsView(
        taken=len(taken),
        last_name=text(last.get("name")),
        last_reason=text(last.get("reason")),
        left_out=whole(said.get("left_out")) or 0,
        failed=whole(said.get("failed")) or 0,
    )


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9


def _nothing(session: Path) -> View:
    return View(
        path=str(session),
        session_id=session.name,
        state=UNKNOWN,
        notes=(),
        model=None,
        versions={},
        until_sec=None,
        age_sec=None,
        behind_sec=None,
        longest_behind_sec=None,
        engines=(),
        holders=None,
        holders_note=None,
        hottest=None,
        workers=(),
        gpus=(),
        processes=(),
        segments=0,
        window_begin_sec=None,
        snapshots=None,
        disk=None,
    )
