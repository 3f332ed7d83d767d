# SPDX-License-Identifier: Apache-2.0
"""Do frames of events follow each other, with none missing, there twice, or from elsewhere?

Each gives the time of the last event before it, so it follows the frame that ends with that event.
"""

from __future__ import annotations

from typing import NamedTuple

from profilemate.collector.decode import span
from profilemate.collector.journal_reader import Frame


class Link(NamedTuple):
    """A frame that can be applied. ``is_apart``: events are missing before it."""

    frame: Frame
    is_apart: bool


class Chain:
    """The frames of one journal so far.

    A frame that does not follow the one before it is believed once another frame follows it in
    turn: events were lost before it. If none does, it is a copy, or another journal's.

    ``last`` is the time that the next frame has to give; None: any.
    """

    def __init__(self, last: int | None) -> None:
        self.last = last
        self._since = -1
        self._held: tuple[Frame, int, int] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether no frame waits for another one that follows it."""
        return self._held is None

    def add(self, frame: Frame) -> tuple[list[Link], bool]:
        """Take the next frame of the file; returns those that can be applied now, in order, and
        whether this one follows what came before it.

        Raises:
            DecodeError: the frame is not as long as it says.

        """
        since, last = span(frame.payload)
        held = self._held
        if self.last in (None, since):
            self._follow(since, last)
            return [Link(frame, False)], True
        if held is not None and since == held[2]:
            self._follow(since, last)
            return [Link(held[0], True), Link(frame, False)], True
        if since > self._since:
            self._held = frame, since, last
        return [], False

    def may_precede(self, since: int | None) -> bool:
        """Whether a frame that gives this time may come next; None: it gives none."""
        return since is None or self.last in (None, since) or self._held is not None

    def _follow(self, since: int, last: int) -> None:
        self._held, self._since, self.last = None, since, last
