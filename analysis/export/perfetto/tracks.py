# SPDX-License-Identifier: Apache-2.0
"""Which tracks does a trace have?"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from analysis.export.perfetto.packets import Packets

STEPS, TOKENS, REQUESTS, POOLS, OTHERS = range(5)
"""Places of an engine's tracks."""


@dataclass
class Tracks:
    """Describes each track when it is needed first. Its number follows from its name, so nothing
    but the set of numbers is kept."""

    packets: Packets
    _known: set[int] = field(default_factory=set)

    def engine(self, engine: int) -> int:
        """The track that an engine's others lie under."""
        uuid, new = self._uuid("engine", engine)
        if new:
            self.packets.track(uuid, f"Engine {engine}", rank=engine)
        return uuid

    def of_engine(self, engine: int, name: str, rank: int, *, by_time: bool = False) -> int:
        """A track of an engine, or one that others of its lie under."""
        uuid, new = self._uuid("engine", engine, name)
        if new:
            self.packets.track(uuid, name, self.engine(engine), rank=rank, by_time=by_time)
        return uuid

    def request(self, engine: int, request_id: str) -> int:
        """The track of a request."""
        uuid, new = self._uuid("request", engine, request_id)
        if new:
            above = self.of_engine(engine, "Requests", REQUESTS, by_time=True)
            self.packets.track(uuid, request_id, above)
        return uuid

    def worker(self, worker: int, name: str, rank: int) -> int:
        """A track of a worker."""
        above, is_new = self._uuid("worker", worker)
        if is_new:
            self.packets.track(above, f"Worker {worker}", rank=1000 + worker)
        uuid, new = self._uuid("worker", worker, name)
        if new:
            self.packets.track(uuid, name, above, rank=rank)
        return uuid

    def counter(self, above: int, name: str, unit: str, rank: int) -> int:
        """A track of values under another track."""
        uuid, new = self._uuid("counter", above, name)
        if new:
            self.packets.counter_track(uuid, name, unit, above, rank)
        return uuid

    def top(self, name: str, rank: int) -> int:
        """A track that lies under none."""
        uuid, new = self._uuid("top", name)
        if new:
            self.packets.track(uuid, name, rank=rank)
        return uuid

    def under(self, above: int, key: object, name: str, lane: int) -> int:
        """A track under another one; ``key`` and ``lane`` tell those of one name apart."""
        uuid, new = self._uuid("under", above, key, lane)
        if new:
            self.packets.track(uuid, name, above)
        return uuid

    def _uuid(self, *names: object) -> tuple[int, bool]:
        """A track's number, and whether it has not been described yet."""
        digest = blake2b(repr(names).encode(errors="replace"), digest_size=8).digest()
        uuid = int.from_bytes(digest, "little") | 1
        if uuid in self._known:
            return uuid, False
        self._known.add(uuid)
        return uuid, True
