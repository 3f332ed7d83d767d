# SPDX-License-Identifier: Apache-2.0
"""When was nothing recorded, because the user had paused it?"""

from __future__ import annotations

from profilemate.collector.decode import ImpossibleError

MOST_PAUSES = 100
"""So many are known, the last ones."""


class Pauses:
    """The pauses of one process. ``times`` has the beginning and the end of each in nanoseconds of
    the monotonic clock; the end is None as long as the recording has not gone on."""

    def __init__(self) -> None:
        self.times: list[list[int | None]] = []
        self._count = 0

    @property
    def is_now(self) -> bool:
        """Whether the recording is paused."""
        return bool(self.times) and self.times[-1][1] is None

    @property
    def since(self) -> int | None:
        """When the pause began in which the recording is; None where it is in none."""
        return self.times[-1][0] if self.is_now else None

    @property
    def turns(self) -> int:
        """Changes whenever the recording pauses or goes on."""
        return 2 * self._count - self.is_now

    def begin(self, time: int) -> None:
        """The recording pauses."""
        self._count += 1
        self.times = [*self.times[1 - MOST_PAUSES :], [time, None]]

    def end(self, time: int) -> None:
        """The recording goes on. Each pool of an engine says so, one after the other."""
        if not self.times:
            raise ImpossibleError("the recording went on, and was not paused")
        if self.is_now:
            self.times[-1][1] = time

    def seconds(self, origin_ns: int) -> list[list[float | None]]:
        """The same in seconds of the session, to the microsecond."""
        return [
            [None if time is None else round((time - origin_ns) / 1e9, 6) for time in pause]
            for pause in self.times
        ]
