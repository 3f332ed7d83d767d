# SPDX-License-Identifier: Apache-2.0
"""Which requests hold blocks, and since when?

With one group of full attention, a request's blocks are all that it allocated and reused since it
last freed them. Only the end of kv_cache_allocations.csv is read, so a request may hold blocks of
which the rows were not seen. ``Ledger.holders`` gives nothing unless as many requests hold blocks
as the last step says run, and each of them was seen from its beginning:

* where the table has been followed from its first row,
* where a prefix hit marks the beginning, as only admitted requests have one,
* where the blocks that were seen to be allocated are all that the pool says are held,

and from then on, as long as no row is missed. A request that ends, and all of whose blocks others
go on holding, has no row for that here, but one in requests.jsonl.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from analysis.tables.facts import FULL_ATTENTION
from analysis.tables.metadata import listed, part, parts, text
from profilemate.format.cells import plain
from profilemate.live.tails import FIRST_BYTES, Row, Tail, last_rows, seconds, whole

MOST_AHEAD = 200_000
"""Rows that may wait for the step that they belong to; more mean that there is none."""

SEVERAL_GROUPS = "not known for several KV cache groups, or other attention than full attention"
NO_GROUPS = "not known: metadata.json does not name the KV cache groups"
CONNECTOR = "not known with a KV connector, which holds blocks of requests that do not run"
PAUSED = "not known, as the recording was paused: nothing says since when requests hold blocks"
LOST = "not known, as part of the recording ended early"
NOT_SEEN = "not known yet: rows from before the end of the open table are not read"
NO_STEP = "not known yet: no step has been written"


@dataclass(frozen=True)
class Holder:
    """A request that holds blocks, ``reused_blocks`` of them found in the prefix cache; a block
    that several requests hold counts for each. ``since_sec``: when it got the first of them;
    ``age_sec``: how long before the engine's last step that was."""

    engine: int
    request_id: str
    blocks: int
    reused_blocks: int
    since_sec: float
    age_sec: float


@dataclass
class _Held:
    since: float
    is_whole: bool
    allocated: int = 0
    reused: int = 0


@dataclass
class _Engine:
    is_certain: bool
    """Whether each request that holds blocks was seen from its beginning, so that any other one
    begins with its next row."""
    holds: dict[str, _Held] = field(default_factory=dict)
    ahead: list[Row] = field(default_factory=list)
    """Rows of the next step."""
    at: float = 0.0
    """Time of the last step up to which rows have been applied."""
    is_shown: bool = False
    """Whether these are all holders at that step."""


class _End(NamedTuple):
    engine: int
    request_id: str
    time: float


class Ledger:
    """Who holds blocks, by the rows that have been seen."""

    def __init__(self, session: Path, *, first_bytes: int = FIRST_BYTES) -> None:
        self._session = session
        self._moves = Tail(session, "kv_cache_allocations", first_bytes=first_bytes)
        self._ends = Tail(session, "requests", first_bytes=first_bytes)
        self._ended: list[_End] = []
        """Requests that hold blocks at the last step, and have ended since."""
        self._engines: dict[int, _Engine] = {}
        self._is_from_first_row = False
        self._has_begun = False

    def close(self) -> None:
        """Let go of the tables."""
        self._moves.close()
        self._ends.close()

    def look(self, steps: Mapping[int, Row]) -> None:
        """Apply what is new. ``steps``: the last row of scheduler_steps.csv of each engine, which
        was read before."""
        rows = self._moves.new_rows()
        if self._moves.gap:
            self._engines.clear()
        if not self._has_begun or self._moves.gap:
            self._is_from_first_row = not self._moves.gap
        self._has_begun = True
        for row in rows:
            rank = whole(row["engine"])
            if rank is not None:
                self._engine(rank).ahead.append(row)
        for rank, step in steps.items():
            _apply(self._engine(rank), seconds(step["timestamp_sec"]))
        self._end_requests()
        for rank, step in steps.items():
            self._judge(rank, whole(step["running_reqs"]))

    def _end_requests(self) -> None:
        """Let go of the requests that had ended at the last step."""
        later = []
        for end in (*self._ended, *map(_end, self._ends.new_lines())):
            engine = self._engines.get(end.engine)
            held = engine.holds.get(end.request_id) if engine else None
            if engine is None or held is None or held.since > end.time:
                continue
            if end.time <= engine.at:
                del engine.holds[end.request_id]
            else:
                later.append(end)
        self._ended = later

    def _judge(self, rank: int, running: int | None) -> None:
        """Find out whether the holders that were seen are all that there are at this step."""
        engine = self._engine(rank)
        holds = engine.holds.values()
        as_many = len(holds) == running
        if as_many and not engine.is_certain:
            engine.is_certain = all(held.is_whole for held in holds) or self._are_all(rank, engine)
        engine.is_shown = as_many and engine.is_certain

    def _are_all(self, rank: int, engine: _Engine) -> bool:
        """Whether the blocks that holders allocated are all that are held. Each block is allocated
        to one holder at a time, so then none of them has a block that was not seen."""
        row = last_rows(self._session, "kv_cache_usage", [rank], {rank: engine.at}).get(rank)
        allocated = sum(held.allocated for held in engine.holds.values())
        return row is not None and allocated == whole(row["num_blocks"])

    def holders(self) -> tuple[Holder, ...] | None:
        """All requests that hold blocks; None where that is not certain."""
        if not self._engines or not all(each.is_shown for each in self._engines.values()):
            return None
        return tuple(
            Holder(
                engine=rank,
                request_id=request_id,
                blocks=held.allocated + held.reused,
                reused_blocks=held.reused,
                since_sec=held.since,
                age_sec=max(0.0, engine.at - held.since),
            )
            for rank, engine in sorted(self._engines.items())
            for request_id, held in engine.holds.items()
        )

    def _engine(self, rank: int) -> _Engine:
        if rank not in self._engines:
            self._engines[rank] = _Engine(self._is_from_first_row)
        return self._engines[rank]


def why_not(metadata: Mapping[str, object], engines_lost: Sequence[str]) -> str | None:
    """Why holders cannot be told of a session, whatever its tables say; None where they can."""
    groups = parts(metadata, "groups")
    if not groups:
        return NO_GROUPS
    if len(groups) != 1 or text(groups[0].get("kind")) not in FULL_ATTENTION:
        return SEVERAL_GROUPS
    if text(part(metadata, "scheduler").get("connector")):
        return CONNECTOR
    if {"blocks", "frees"} & set(engines_lost):
        return LOST
    if any(listed(process.get("pauses")) for process in parts(metadata, "processes")):
        return PAUSED
    return None


def _apply(engine: _Engine, until: float) -> None:
    """Apply the rows up to this step: those after it belong to the next one."""
    if len(engine.ahead) > MOST_AHEAD:
        engine.ahead.clear()
        engine.holds.clear()
        engine.is_certain = False
    due = [row for row in engine.ahead if seconds(row["timestamp_sec"]) <= until]
    engine.ahead = [row for row in engine.ahead if seconds(row["timestamp_sec"]) > until]
    engine.at = until
    for row in due:
        _move(engine, row)


def _move(engine: _Engine, row: Row) -> None:
    event, request_id = row["event"], row["request_id"]
    blocks = whole(row["num_blocks"])
    if not request_id or blocks is None or event not in ("allocate", "reuse", "free"):
        return
    if event == "free":
        engine.holds.pop(request_id, None)
        return
    held = engine.holds.get(request_id)
    if held is None:
        # Only at its admission does a request find blocks in the prefix cache.
        begins = engine.is_certain or event == "reuse"
        held = engine.holds[request_id] = _Held(seconds(row["timestamp_sec"]), begins)
    if event == "allocate":
        held.allocated += blocks
    else:
        held.reused += blocks


# In JSON a quote within a text has a backslash before it, so no client's text looks like a key.
_END = re.compile(
    rb',"request_id":("(?:[^"\\]|\\.)*"),"engine":(\d{1,9}),.*,"finish_sec":([0-9.]{1,20}),'
)


def _end(line: bytes) -> _End:
    """What a row of requests.jsonl says; of no engine where it is damaged."""
    found = _END.search(line)
    try:
        if found:
            return _End(int(found[2]), plain(json.loads(found[1])), float(found[3]))
    except ValueError:
        pass
    return _End(-1, "", 0.0)
