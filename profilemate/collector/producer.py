# SPDX-License-Identifier: Apache-2.0
"""One process's journal, and the state that its events lead to."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from profilemate.collector.chain import Chain
from profilemate.collector.contents import ids_of
from profilemate.collector.decode import GAP, DecodeError, Episode, ImpossibleError, episodes
from profilemate.collector.engine import Engine
from profilemate.collector.header import Header, read_header, read_status
from profilemate.collector.journal_reader import Frame, JournalReader
from profilemate.collector.tables import Tables
from profilemate.collector.totals import Totals
from profilemate.collector.worker import Worker
from profilemate.format import content_key, processes
from profilemate.format.errors import SessionError
from profilemate.format.events import PARTS
from profilemate.format.journal import MAGIC, Kind, file_name
from profilemate.format.session import Founding

HEADER_SEC = 60.0
"""The writer of an empty journal that is younger than this is about to begin."""

FRAMES_OF_NEW = 2
"""Of a file that has only just been made, and is not in use yet."""

MAX_PROBLEMS = 5
"""So many are listed; the others are counted."""


class Place(NamedTuple):
    """Where a journal is read on, and what its frames have to follow there.

    ``number`` is the file's; ``events_at`` is where the last frame of events in front of ``offset``
    begins; ``follows`` and ``last_time`` are the times of the last event and of the last episode.
    """

    number: int
    offset: int
    events_at: int
    follows: int | None
    last_time: int


@dataclass(slots=True)
class _Unapplied:
    """The episodes of one frame, ``applied`` of ``count`` of them. ``place`` is where the frame is;
    None where reading it again would not lead to the same."""

    place: Place | None
    count: int
    applied: int = 0


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
        number: int = 1,
    ) -> None:
        self.name = path.stem
        self.number = number
        self._path = path
        self._dir_fd = dir_fd
        self._passed = 0
        self._goes_on = False
        self._skip = 0
        self._unapplied: deque[_Unapplied] = deque()
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
        self._reader = self._reader_of(number)
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
        before = self.position
        while True:
            for frame in self._frames():
                self._take(frame)
            if not self._goes_on:
                break
            self._turn()
        self.exhausted = self.position == before
        return self.position - before

    def apply(self, episode: Episode) -> None:
        """Apply the events of one episode. Where that fails, what depends on them is left out."""
        of_frame = self._unapplied[0]
        of_frame.applied += 1
        if of_frame.applied == of_frame.count:
            self._unapplied.popleft()
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
        elif not self._chain.may_precede(self._reader.torn_since):
            self._has_problem(f"events are missing before byte {self._reader.offset:,}")
        if self.state is not None:
            try:
                self.state.close()
            except Exception as error:
                self._has_problem(f"it could not be completed: {_named(error)}")
        self._reader.close()

    @property
    def position(self) -> int:
        """Bytes of the journal that have been read."""
        return self._passed + self._reader.offset

    @property
    def can_be_saved(self) -> bool:
        """Whether who reads the journal on from here comes to the same tables."""
        first = self._unapplied[0] if self._unapplied else None
        return self._chain.is_whole and (first is None or first.place is not None)

    def saved(self) -> dict[str, Any] | None:
        """All that has come of the journal so far, as JSON; None where that is nothing."""
        if self.state is None:
            return None
        first = self._unapplied[0] if self._unapplied else None
        place = first.place if first and first.place else self._place(self._reader.offset)
        return {
            "name": self.name,
            "place": place,
            "skip": first.applied if first else 0,
            "starts": [start for start in self._reader.starts if start < place.offset],
            "header": self.header,
            "status": self.status,
            # Its end has been read again by then, if it lies behind what is applied.
            "ended_well": self.ended_well and not self._unapplied,
            "problems": self._problems,
            "more_problems": self._more_problems,
            "state": self.state.saved(),
        }

    @classmethod
    def restored(
        cls,
        saved: dict[str, Any],
        journals: Path,
        founding: Founding,
        tables: Tables,
        totals: Totals,
        dir_fd: int | None = None,
    ) -> Producer:
        """The producer as it was when it was ``saved``."""
        place = Place(*saved["place"])
        path = journals / file_name(saved["name"], 1)
        self = cls(path, founding, tables, totals, dir_fd, place.number)
        self._reader.close()
        self._reader = self._reader_of(place.number, place.offset, saved["starts"])
        header = read_header(json.dumps(saved["header"]).encode())
        self._begin(header)
        self._chain = Chain(place.follows)
        self._events_at, self._last_time = place.events_at, place.last_time
        self._skip = saved["skip"]
        self.status, self.ended_well = saved["status"], saved["ended_well"]
        self._problems, self._more_problems = saved["problems"], saved["more_problems"]
        assert self.state is not None
        self.state.restore(saved["state"])
        return self

    @property
    def needed_from(self) -> int:
        """The number of the first file that is still to be read, once this is saved."""
        first = self._unapplied[0] if self._unapplied else None
        return first.place.number if first and first.place else self.number

    @property
    def alive(self) -> bool:
        """Whether the process may still write."""
        if self.ended_well:
            return False
        if self._known is None:
            return self._reader.age_sec < HEADER_SEC
        return processes.is_alive(self._known.pid, self._known.start)

    def _reader_of(self, number: int, offset: int = 0, starts: Sequence[int] = ()) -> JournalReader:
        path = self._path.with_name(file_name(self.name, number))
        return JournalReader(path, self._dir_fd, offset, starts)

    def _place(self, offset: int) -> Place:
        return Place(self.number, offset, self._events_at, self._chain.last, self._last_time)

    def _turn(self) -> None:
        """Read on in the next file."""
        self._goes_on = False
        name = file_name(self.name, self.number + 1)
        try:
            reader = self._reader_of(self.number + 1)
        except OSError as error:
            self._is_given_up = True
            self._has_problem(f"{name} cannot be read: {error.strerror}")
            self._miss_events(f"{name} cannot be read")
            return
        if self._reader.unread:
            self._has_problem(f"{self._reader.unread:,} bytes lie behind the end of a file of it")
        self._passed += self._reader.offset
        self._reader.close()
        self._reader, self.number = reader, self.number + 1
        self._damage_seen, self._events_at = 0, -1

    def _is_next_in_use(self) -> bool:
        """Whether the next file has more than it begins with, so that nothing more comes here."""
        try:
            reader = self._reader_of(self.number + 1)
        except OSError:
            return False
        try:
            return len(reader.read()) > FRAMES_OF_NEW
        finally:
            reader.close()

    def _frames(self) -> list[Frame]:
        if self._is_given_up:
            return []
        try:
            frames = self._reader.read()
            # Whether it lives is asked between the two: what it wrote before it ended is read.
            if not frames and self._reader.unread and not self.alive:
                frames = self._reader.read(ended=True)
            if not frames and self._is_next_in_use():
                frames = self._reader.read()
                if not frames:
                    self._reader.pass_rest()
                    self._goes_on = True
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
        if self._known is not None and (self._passed == 0 or frame.offset != len(MAGIC)):
            raise DecodeError("a second header")
        header = read_header(frame.payload)
        if self.name != f"{header.role}{header.rank}":
            raise DecodeError(f"header: of {header.role} {header.rank}")
        if self._known is None:
            self._begin(header)
            if self.number > 1:
                self._miss_events("its first files are gone, and no checkpoint has what they told")
        elif (header.pid, header.start) != (self._known.pid, self._known.start):
            raise DecodeError("header: of another process")

    def _begin(self, header: Header) -> None:
        self._known, self.header = header, header.facts
        self._chain = Chain(header.since)
        origin, key = self._founding.origin_ns, self._founding.key
        if header.role == "worker":
            self.state = Worker(header, origin, key, self._tables, self._totals)
        else:
            basis = header.facts.get("content_basis")
            ids = ids_of(content_key.key_of(self._founding, basis), key)
            self.state = Engine(header, origin, ids, self._tables, self._totals)

    def _take_events(self, frame: Frame) -> None:
        self._events_at = frame.offset
        if self.state is None:
            self._has_problem("its header cannot be read, and without it no events")
            return
        place = self._place(frame.offset) if self._chain.is_whole else None
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
                place = None
            self._take_episodes(link.frame.payload, self.state, place)

    def _take_episodes(self, payload: bytes, state: Engine | Worker, place: Place | None) -> None:
        try:
            read = episodes(payload, state.shape, state.content_ids, self._founding.origin_ns)
        except DecodeError as error:
            self._miss_events(str(error))
            raise
        known, self._skip = read[: self._skip], 0
        for episode in known:
            # They were applied before the state was saved.
            self._last_time = max(self._last_time, episode.time)
        read = read[len(known) :]
        if read:
            self._unapplied.append(_Unapplied(place, len(known) + len(read), len(known)))
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
        self._goes_on |= "next" in status
        for name, value in status.items():
            before = self.status.get(name)
            if isinstance(before, dict) and isinstance(value, dict):
                self.status[name] = {**before, **value}
            else:
                self.status[name] = value

    def _miss_events(self, reason: str) -> None:
        """Have what depends on events that cannot be read end here, in its turn."""
        self._unapplied.append(_Unapplied(None, 1))
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
