# SPDX-License-Identifier: Apache-2.0
"""Write what happens to an engine's blocks: rows of the three kv_cache tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from profilemate.collector.blocks import NEVER, NO_GROUP, Life, Loss, Pool
from profilemate.collector.decode import ImpossibleError
from profilemate.collector.engine_totals import UNKNOWN, EngineTotals
from profilemate.collector.tables import Tables


class BlockRows:
    """The rows of one engine. ``step`` is the scheduler step that they belong to.

    Args:
        rank: the engine's.
        origin_ns: second 0 of the session.
        usage_blocks: what vLLM divides by where it says how full each pool is.
        tables: where the rows go.
        totals: where they are added up.

    """

    def __init__(
        self,
        rank: int,
        origin_ns: int,
        usage_blocks: Sequence[int],
        tables: Tables,
        totals: EngineTotals,
    ) -> None:
        self.step = 0
        self._rank = rank
        self._origin = origin_ns
        self._usage_blocks = usage_blocks
        self._usage = tables.append("kv_cache_usage.csv")
        self._allocations = tables.append("kv_cache_allocations.csv")
        self._evictions = tables.append("kv_cache_evictions.csv")
        self._totals = totals
        self._last_usage: list[tuple[int, ...] | None] = [None] * len(usage_blocks)
        self.last_rows = [""] * len(usage_blocks)
        """The last usage row of each pool."""

    def saved(self) -> dict[str, Any]:
        """What later rows depend on, as JSON."""
        return {"last_usage": self._last_usage, "last_rows": self.last_rows}

    def restore(self, saved: dict[str, Any]) -> None:
        """Be as when it was ``saved``."""
        self._last_usage = [usage and tuple(usage) for usage in saved["last_usage"]]
        self.last_rows = saved["last_rows"]

    def usage(
        self,
        time: int,
        when: str,
        number: int,
        pool: Pool,
        free: int,
        running: int,
        waiting: int,
    ) -> None:
        """The pool is so full; nothing is written where that is what the last row says.

        ``free`` is vLLM's count, of blocks that no request holds.
        """
        held, cached = pool.num_held, pool.num_cached
        state = (held, cached, running, waiting)
        if state == self._last_usage[number]:
            return
        self._last_usage[number] = state
        of = self._usage_blocks[number]
        usage = f"{100 * (1 - free / of) if of else 0.0:.2f}"
        totals = self._totals
        totals.changes.append((totals.pools[number], time, usage, held, cached))
        row = (
            f"{when},{usage},{held},{pool.total},{cached},{pool.num_free},"
            f"{running},{waiting},{self._rank},{number}"
        )
        self.last_rows[number] = row
        self._usage(row)

    def forget_usage(self, number: int) -> None:
        """What the pool's last row says does not hold any more."""
        self._last_usage[number] = None

    def moved(
        self,
        time: int,
        pool: int,
        event: str,
        count: int,
        cell: str,
        evicted: int,
        group: int | str,
    ) -> str:
        """So many blocks were allocated, reused, cached or freed, or all lost their contents;
        returns the row."""
        if group == NO_GROUP:
            group = ""
        self._totals.moved[pool, event, group] += count
        row = (
            f"{(time - self._origin) / 1e9:.6f},{event},{count},{cell},{evicted},{self.step},"
            f"{self._rank},{pool},{group}"
        )
        self._allocations(row)
        return row

    def evicted(self, losses: list[Loss], time: int, reason: str, cell: str, pool: int) -> int:
        """These contents were lost; returns how many they are."""
        if not losses:
            return 0
        when = f"{(time - self._origin) / 1e9:.6f}"
        count, lost = 0, self._totals.losses
        ending = time, when, reason, cell, pool
        for life, copies_left, blocks, contents in losses:
            allocated, accessed, freed, reuses, owner, group, origin = life
            if allocated == NEVER:
                count += self._evicted_unknown(life, copies_left, blocks, contents, ending)
                continue
            lifetime, idle = time - allocated, time - accessed
            let_go = time if freed is None else freed
            if not self._origin <= allocated <= accessed <= let_go <= time:
                raise ImpossibleError(f"block {blocks[0]:,} lost its content before it had it")
            lived = f"{lifetime / 1e9:.6f}"
            idled = lived if idle == lifetime else f"{idle / 1e9:.6f}"
            evictable = "" if freed is None else f"{(time - freed) / 1e9:.6f}"
            begin = f"{when},{lived},{idled},{evictable},"
            middle = f",{reuses},{reason},"
            end = f",{copies_left},{origin},{owner},{cell},{self._rank},{pool},{group}"
            between = f"{end}\n{begin}"
            pairs = zip(blocks, contents, strict=True)
            rows = [f"{block}{middle}{content}" for block, content in pairs]
            self._evictions(f"{begin}{between.join(rows)}{end}")
            number = len(rows)
            count += number
            since = None if freed is None else time - freed
            lost[pool, group, reason, origin].append(
                (number, lifetime, idle, since, reuses, copies_left)
            )
        return count

    def _evicted_unknown(
        self,
        life: Life,
        copies_left: int,
        blocks: list[int],
        contents: list[str],
        ending: tuple[int, str, str, str, int],
    ) -> int:
        """The same of blocks that were there when the recording went on: what they were before is
        not known."""
        time, when, reason, cell, pool = ending
        _, accessed, freed, _, owner, group, origin = life
        idle = None if accessed == NEVER else time - accessed
        since = None if freed is None or freed == NEVER else time - freed
        idled, evictable = ("" if each is None else f"{each / 1e9:.6f}" for each in (idle, since))
        for block, content in zip(blocks, contents, strict=True):
            self._evictions(
                f"{when},,{idled},{evictable},{block},,{reason},{content},{copies_left},{origin},"
                f"{owner},{cell},{self._rank},{pool},{group}"
            )
        key = (pool, group, reason, origin or UNKNOWN)
        self._totals.unknown_losses[key].append((len(blocks), idle, since, copies_left))
        return len(blocks)
