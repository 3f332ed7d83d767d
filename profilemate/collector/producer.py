# SPDX-License-Identifier: Apache-2.0
"""One process's journal, and the state that its events lead to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from profilemate.collector.chain import Chain
from profilemate.collector.decode import GAP, DecodeError, Episode, ImpossibleError, episodes
from profilemate.collector.engine import Engine
from profilemate.collector.header import Header, read_header, read_status
from profilemate.collector.journal_reader import Frame, JournalReader
from profilemate.collector.tables import Tables
from profilemate.collector.totals import Totals
from profilemate.collector.worker import Worker
from profilemate.format import processes
from profilemate.format.errors import SessionError
from profilemate.format.events import PARTS
from profilemate.format.journal import Kind
from profilemate.format.session import Founding

HEADER_SEC = 60.0
"""The writer of an empty journal that is younger than this is about to begin."""

MAX_PROBLEMS = 5
"""So many are listed; the others are counted."""


class Producer:
    """A journal and the state that its events have led to, which is an engine's or a worker's.

    ``episodes`` have been read but not applied yet, in the order of their times. ``exhausted``
    says that the last call of ``read`` found nothing more. Whatever a damaged journal holds, it
    costs this producer and no other: it is left out, and is a ``problem``.
    """

    def __init__(
        self,
        path: Path,
        founding: Founding,
        tables: Tables,
        totals: Totals,
        dir_fd: int | None = None,
    ) -> None:
        self.name = path.stem
        self.header: dict[str, Any] = {}
        self.status: dict[str, Any] = {}
        self.ended_well = False
        self.episodes: list[Episode] = []
        self.exhausted = False
        self.state: Engine | Worker | None = None
        self._problems: list[str] = []
        self._more_problems = 0
        self._is_given_up = False
        self._known: Header | None = None
        self._last_time = founding.origin_ns
        self._chain = Chain(None)
        self._damage_seen = 0
        self._events_at = -1
        self._reader = JournalReader(path, dir_fd)
        self._founding = founding
        self._tables = tables
        self._totals = totals

    @property
    def problem(self) -> str | None:
        """What of the journal could not be read or applied; None where nothing."""
        if not self._problems:
            return None
        more = f"; and {self._more_problems:,} more" if self._more_problems else ""
        return "; ".join(self._problems) + more

    @property
    def lost(self) -> dict[str, dict[str, str]]:
        """The parts of the recording that ended early: their tables, and why."""
        ended = self.state.lost if isinstance(self.state, Engine) else {}
        parts = {part: {"tables": PARTS[part], "reason": ended[part]} for part in ended}
        return {**parts, **self.status.get("lost", {})}

    def read(self) -> int:
        """Read what is new since the last call, up to a limit; returns how many bytes."""
        before = self._reader.offset
        for frame in self._frames():
            self._take(frame)
        self.exhausted = self._reader.offset == before
        return self._reader.offset - before

    def apply(self, episode: Episode) -> None:
        """Apply the events of one episode. Where that fails, what depends on them is left out."""
        if self.state is None:
            return
        try:
            self.state.apply(episode)
        except Exception as error:
            # Whatever it is: no other producer's events may be lost with these.
            reason = f"events could not be applied: {_named(error)}"
            self._has_problem(reason)
            self.state.miss_events(reason)

    def close(self) -> None:
        """Nothing more comes."""
        if self.ended_well and self._reader.unread:
            self._has_problem(f"{self._reader.unread:,} bytes lie behind its end")
        if self.state is not None:
            try:
                self.state.close()
            except Exception as error:
                self._has_problem(f"it could not be completed: {_named(error)}")
        self._reader.close()

    @property
    def position(self) -> int:
        """Bytes of the journal that have been read."""
        return self._reader.offset

    @property
    def alive(self) -> bool:
        """Whether the process may still write."""
        if self.ended_well:
            return False
        if self._known is None:
            return self._reader.age_sec < HEADER_SEC
        return processes.is_alive(self._known.pid, self._known.start)

    def _frames(self) -> list[Frame]:
        if self._is_given_up:
            return []
        try:
            frames = self._reader.read()
            # Whether it lives is asked between the two: what it wrote before it ended is read.
            if not frames and self._reader.unread and not self.alive:
                frames = self._reader.read(ended=True)
        except SessionError as error:
            self._is_given_up = True
            self._has_problem(str(error))
            return []
        for offset, length in self._reader.damage[self._damage_seen :]:
            if not length:
                self._has_problem(f"its journal was cut at byte {offset:,} while it was read")
            elif not offset and not frames:
                self._has_problem(f"{self._reader.path.name} is not a profilemate journal")
            else:
                self._has_problem(f"{length:,} bytes of its journal at byte {offset:,} are damaged")
        self._damage_seen = len(self._reader.damage)
        return frames

    def _take(self, frame: Frame) -> None:
        if self.ended_well:
            self.ended_well = False
            self._has_problem(f"frames follow its end, at byte {frame.offset:,}")
        try:
            if frame.kind == Kind.EVENTS:
                self._take_events(frame)
            elif frame.kind == Kind.HEADER:
                self._take_header(frame)
            elif frame.kind in (Kind.STATUS, Kind.END):
                self.ended_well = frame.kind == Kind.END
                self._take_status(frame)
            else:
                kind = f"frame kind {frame.kind}"
                self._has_problem(f"of a newer profilemate: {kind} at byte {frame.offset:,}")
        except DecodeError as error:
            self._has_problem(f"{error} (at byte {frame.offset:,})")
        except Exception as error:
            # A fault of ours must not cost the session's other producers.
            self._has_problem(f"{_named(error)} (at byte {frame.offset:,})")
            self._miss_events(f"byte {frame.offset:,} of its journal cannot be read")

    def _take_header(self, frame: Frame) -> None:
        if self._known is not None:
            raise DecodeError("a second header")
        header = read_header(frame.payload)
        if self.name != f"{header.role}{header.rank}":
            raise DecodeError(f"header: of {header.role} {header.rank}")
        self._known, self.header = header, header.facts
        self._chain = Chain(header.since)
        origin, key = self._founding.origin_ns, self._founding.key
        if header.role == "worker":
            self.state = Worker(header, origin, key, self._tables, self._totals)
        else:
            self.state = Engine(header, origin, key, self._tables, self._totals)

    def _take_events(self, frame: Frame) -> None:
        self._events_at = frame.offset
        if self.state is None:
            self._has_problem("its header cannot be read, and without it no events")
            return
        try:
            links, follows = self._chain.add(frame)
        except DecodeError as error:
            self._miss_events(str(error))
            raise
        if not follows:
            self._has_problem(f"the events at byte {frame.offset:,} do not follow those before")
        for link in links:
            if link.is_apart:
                self._miss_events(f"events are missing before byte {link.frame.offset:,}")
            self._take_episodes(link.frame.payload, self.state)

    def _take_episodes(self, payload: bytes, state: Engine | Worker) -> None:
        try:
            read = episodes(payload, state.shape, state.content_ids, self._founding.origin_ns)
        except DecodeError as error:
            self._miss_events(str(error))
            raise
        for episode in read:
            # A worker records some executions late, behind a frame of later ones.
            if episode.time < self._last_time:
                self.episodes.append(episode._replace(time=self._last_time))
            else:
                self._last_time = episode.time
                self.episodes.append(episode)

    def _take_status(self, frame: Frame) -> None:
        status = read_status(frame.payload)
        # It says how long the journal was before the write that it came with.
        size = status.get("bytes")
        if size is not None and size not in (frame.offset, self._events_at):
            self._has_problem(
                f"bytes are missing, or written twice, before byte {frame.offset:,}: "
                f"there were {size:,}"
            )
        for name, value in status.items():
            before = self.status.get(name)
            if isinstance(before, dict) and isinstance(value, dict):
                self.status[name] = {**before, **value}
            else:
                self.status[name] = value

    def _miss_events(self, reason: str) -> None:
        """Have what depends on events that cannot be read end here, in its turn."""
        self.episodes.append(Episode(self._last_time, bytes([GAP]), [(reason,)]))

    def _has_problem(self, problem: str) -> None:
        if problem in self._problems:
            return
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(problem)
        else:
            self._more_problems += 1


def _named(error: Exception) -> str:
    return str(error) if isinstance(error, ImpossibleError) else f"{type(error).__name__}: {error}"
