# SPDX-License-Identifier: Apache-2.0
"""One process's journal, and the state that its events lead to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from profilemate.collector.decode import DecodeError, Episode, episodes
from profilemate.collector.engine import Engine
from profilemate.collector.tables import Tables
from profilemate.collector.totals import Totals
from profilemate.collector.worker import Worker
from profilemate.format import processes
from profilemate.format.journal import JournalReader, Kind
from profilemate.format.session import Founding

HEADER_SEC = 60.0
"""The writer of an empty journal that is younger than this is about to begin."""


class Producer:
    """A journal and the state that its events have led to, which is an engine's or a worker's.

    ``episodes`` have been read but not applied yet, in the order of their times. ``exhausted``
    says that the last call of ``read`` found nothing more.
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
        self.problem: str | None = None
        self.episodes: list[Episode] = []
        self.exhausted = False
        self.state: Engine | Worker | None = None
        self._last_time = 0
        self._reader = JournalReader(path, dir_fd)
        self._founding = founding
        self._tables = tables
        self._totals = totals

    def read(self) -> int:
        """Read what is new since the last call, up to a limit; returns how many bytes."""
        before = self._reader.offset
        frames = self._reader.read()
        for kind, payload in frames:
            if kind is Kind.EVENTS:
                self._take_events(payload)
            elif kind is Kind.HEADER:
                self._take_header(json.loads(payload))
            else:
                self._take_status(json.loads(payload))
                self.ended_well = kind is Kind.END
        self.exhausted = self._reader.offset == before
        return self._reader.offset - before

    def apply(self, episode: Episode) -> None:
        """Apply the events of one episode. Where that fails, the rest is left out."""
        if self.problem is not None or self.state is None:
            return
        try:
            self.state.apply(episode)
        except (LookupError, ValueError, AssertionError) as error:
            self.problem = f"events could not be applied: {type(error).__name__}: {error}"

    def close(self) -> None:
        """Nothing more comes."""
        if self.state is not None:
            self.state.close()
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
        if not self.header:
            return self._reader.age_sec < HEADER_SEC
        return processes.is_alive(int(self.header["pid"]), self.header.get("start", ""))

    def _take_header(self, header: dict[str, Any]) -> None:
        self.header = header
        origin, key = self._founding.origin_ns, self._founding.key
        if header.get("producer") == "worker":
            self.state = Worker(header, origin, key, self._tables)
        else:
            self.state = Engine(header, origin, key, self._tables, self._totals)

    def _take_events(self, payload: bytes) -> None:
        if self.problem is not None or self.state is None:
            return
        try:
            read = episodes(payload, self.state.shape, self.state.content_ids)
        except DecodeError as error:
            self.problem = f"events could not be read: {error}"
            return
        for episode in read:
            # A worker records some executions late, behind a frame of later ones.
            if episode.time < self._last_time:
                self.episodes.append(episode._replace(time=self._last_time))
            else:
                self._last_time = episode.time
                self.episodes.append(episode)

    def _take_status(self, status: dict[str, Any]) -> None:
        for name, value in status.items():
            before = self.status.get(name)
            if isinstance(before, dict) and isinstance(value, dict):
                self.status[name] = {**before, **value}
            else:
                self.status[name] = value
