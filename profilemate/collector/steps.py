# SPDX-License-Identifier: Apache-2.0
"""Turn steps into rows: consecutive ones that scheduled nothing are one row."""

from __future__ import annotations

import json
from typing import Any

from profilemate.collector.decode import ImpossibleError
from profilemate.collector.lookups import WINDOW_NS
from profilemate.collector.tables import Append

_STATE = (
    *("number", "preempted", "finished", "counts_preempted", "counts_finished", "encoder"),
    *("last_row", "_idle", "_idle_state", "_repeats"),
)

_NO_ITEMS = 0, 0

_MOST_ITEMS, _MOST_TOKENS = 1 << 20, 1 << 31
"""No step gives more to an encoder."""


class StepRows:
    """The steps of one engine. ``number`` is the last step's, counted from 1. ``preempted`` and
    ``finished`` count the requests since the last step's end, as long as these are recorded.
    ``encoder`` has the items that the step under way gives to the encoder, and their tokens.
    ``last_row`` is the last one that was written."""

    def __init__(self, rank: int, origin_ns: int, append: Append) -> None:
        self.number = 0
        self.preempted = 0
        self.finished = 0
        self.counts_preempted = True
        self.counts_finished = True
        self.encoder: tuple[int, int | None] = _NO_ITEMS
        self._rank = rank
        self._origin = origin_ns
        self._append = append
        self.last_row = ""
        self._idle: tuple[str, int] | None = None
        self._idle_state: tuple[int, ...] = ()
        self._repeats = 0

    def ended(
        self,
        began: int,
        ended: int,
        when: str,
        running: int,
        waiting: int,
        tokens: int,
        prefill: int,
        scheduled: int,
    ) -> None:
        """A step ended, at ``when`` as a table shows it: count it, and write its row or keep that
        open."""
        if not (began <= ended and prefill <= tokens):
            raise ImpossibleError(
                f"a step of {(ended - began) / 1e9:g} s with {tokens:,} tokens, {prefill:,} of "
                "them prefill"
            )
        self.number += 1
        preempted = self.preempted if self.counts_preempted else ""
        finished = self.finished if self.counts_finished else ""
        row = (
            f"{when},{self.number},{running},{waiting},{tokens},{prefill},{tokens - prefill},"
            f"{scheduled},{preempted},{finished},{(ended - began) // 1000},"
        )
        if not tokens:
            self._hold(row, ended, (running, waiting))
        else:
            if self._idle is not None:
                self.close()
            self._write(f"{row}1,{self._rank},{_encoder_cells(self.encoder)}")
        self.begin_anew()

    def begin_anew(self) -> None:
        """What is counted for a step counts from here on."""
        self.preempted = self.finished = 0
        self.encoder = _NO_ITEMS

    def encodes(self, blob: bytes) -> None:
        """The step under way gives something to the encoder, as ``More.ENCODER`` says.

        Raises:
            ImpossibleError: no step can.

        """
        try:
            items, tokens = json.loads(blob)
            known = 0 if tokens is None else tokens
            is_sound = type(items) is type(known) is int
            is_sound = is_sound and 0 < items <= _MOST_ITEMS and 0 <= known <= _MOST_TOKENS
        except (ValueError, TypeError):
            is_sound = False
        if not is_sound:
            raise ImpossibleError("an encoder's items that no step has")
        self.encoder = items, tokens

    def repeated(self, count: int, time: int) -> None:
        """The last step was repeated so many times, until ``time``."""
        self.number += count
        self._repeat(count, time)

    def close(self) -> None:
        """Write the open row, if there is one."""
        if self._idle is not None and self._repeats:
            self._write(f"{self._idle[0]}{self._repeats},{self._rank},0,0")
        self._idle = None

    def saved(self) -> dict[str, Any]:
        """What later rows depend on, as JSON."""
        return {name: getattr(self, name) for name in _STATE}

    def restore(self, saved: dict[str, Any]) -> None:
        """Be as when it was ``saved``."""
        for name in _STATE:
            value = saved[name]
            setattr(self, name, tuple(value) if isinstance(value, list) else value)

    def _write(self, row: str) -> None:
        self.last_row = row
        self._append(row)

    def _hold(self, row: str, ended: int, state: tuple[int, int]) -> None:
        """Keep the row of a step that scheduled nothing open, or add it to the one that is open."""
        quiet = not (self.preempted or self.finished)
        if quiet and self._idle is not None and state == self._idle_state:
            self._repeat(1, ended)
            return
        self.close()
        self._idle, self._repeats = (row, ended), 1
        self._idle_state = state

    def _repeat(self, count: int, time: int) -> None:
        if self._idle is None:
            return
        self._repeats += count
        row, began = self._idle
        if time - began >= WINDOW_NS:
            self.close()
            fields = row.split(",")
            fields[0] = f"{(time - self._origin) / 1e9:.6f}"
            fields[1] = str(self.number + 1)
            fields[8] = fields[8] and "0"
            fields[9] = fields[9] and "0"
            self._idle, self._repeats = (",".join(fields), time), 0


def _encoder_cells(encoder: tuple[int, int | None]) -> str:
    items, tokens = encoder
    return f"{items},{'' if tokens is None else tokens}"
