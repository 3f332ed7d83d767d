# SPDX-License-Identifier: Apache-2.0
"""Put the contents of a fleet's sessions side by side, one part of them in memory at a time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from analysis.fleet.partial import Origin
from analysis.fleet.routing import Lost, Routing, gains
from analysis.fleet.shared import PARTS, Shared


@dataclass(frozen=True)
class _Session:
    number: int
    origin: Origin
    key: str
    query_tokens: int
    found_tokens: int


class Joining:
    """Keeps the contents of sessions in files until all are there.

    ``folder``: an empty one, only readable by the user.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sessions: list[_Session] = []
        self._apart = 0
        self._because: set[str] = set()

    def add(self, origin: Origin, shared: Shared | None) -> None:
        """Add a session; None where its contents are its own.

        Raises:
            OSError: there is no room for them.

        """
        if shared is None:
            self._apart += 1
            self._because.update(filter(None, [origin.apart_because]))
            return
        number = len(self._sessions)
        self._sessions.append(
            _Session(number, origin, shared.key, shared.query_tokens, shared.found_tokens)
        )
        for part, packed in enumerate(shared.parts):
            with open(self._folder / str(part), "ab") as file:
                file.write(number.to_bytes(8, "big") + len(packed).to_bytes(8, "big") + packed)

    def result(self) -> Routing:
        """What the replicas could have had of each other."""
        same = Counter(one.key for one in self._sessions)
        joined = [one for one in self._sessions if same[one.key] > 1]
        routed, shared = self._lost(joined)
        query = sum(one.query_tokens for one in joined)
        found = sum(one.found_tokens for one in joined)
        more, most = sum(routed.values()), sum(shared.values())
        return Routing(
            joined=len(joined),
            apart=self._apart + len(self._sessions) - len(joined),
            because=tuple(sorted(self._because)),
            query_tokens=query,
            found_tokens=found,
            routed_tokens=more,
            shared_tokens=most,
            hit_rate=found / query if query else None,
            perfect_routing=(found + more) / query if query else None,
            shared_cache=(found + most) / query if query else None,
            replicas=_by_replica(joined, routed, shared),
        )

    def _lost(self, joined: list[_Session]) -> tuple[Counter[int], Counter[int]]:
        keys: dict[str, set[int]] = defaultdict(set)
        for one in joined:
            keys[one.key].add(one.number)
        routed: Counter[int] = Counter()
        shared: Counter[int] = Counter()
        for numbers in keys.values():
            for part in range(PARTS):
                found = gains((n, packed) for n, packed in self._packed(part) if n in numbers)
                for number, tokens in found.items():
                    routed[number] += tokens[0]
                    shared[number] += tokens[1]
        return routed, shared

    def _packed(self, part: int) -> Iterator[tuple[int, bytes]]:
        with open(self._folder / str(part), "rb") as file:
            while head := file.read(16):
                yield int.from_bytes(head[:8], "big"), file.read(int.from_bytes(head[8:], "big"))


def _by_replica(
    joined: list[_Session], routed: Counter[int], shared: Counter[int]
) -> tuple[Lost, ...]:
    lost: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    deployments: dict[tuple[str, str], str | None] = {}
    for one in joined:
        key = (one.origin.deployment or "", one.origin.replica)
        deployments[key] = one.origin.deployment
        lost[key][0] += routed[one.number]
        lost[key][1] += shared[one.number]
    found = [Lost(deployments[key], key[1], *tokens) for key, tokens in lost.items() if any(tokens)]
    return tuple(
        sorted(found, key=lambda one: (-one.shared_tokens, one.deployment or "", one.replica))
    )
