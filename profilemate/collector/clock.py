# SPDX-License-Identifier: Apache-2.0
"""How does this host's wall clock go beside the monotonic clock of the tables?

Sessions of several hosts meet on the wall clock, and on nothing else: no monotonic clock means
anything on another host, and profilemate opens no connection to ask. So the collector compares its
two clocks from time to time, and asks the kernel how far the wall clock may be off.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from profilemate.format.folder import Folder
from profilemate.format.session import METADATA_FILE, Founding

_UNSYNCHRONIZED = 0x40
"""STA_UNSYNC of adjtimex(2)."""


@dataclass
class Clock:
    """``last_sec``: second of the session at the last checkpoint. ``least_drift_sec`` and
    ``most_drift_sec``: how far the wall clock had gone ahead of ``started_at`` and the seconds of
    the session, at any checkpoint. ``error_sec``: how far the kernel said that it may be off, at
    most; None where it is not synchronized, or where that is not known.
    """

    checkpoints: int = 0
    last_sec: float = 0.0
    least_drift_sec: float = 0.0
    most_drift_sec: float = 0.0
    error_sec: float | None = None

    @classmethod
    def of(cls, session: Folder) -> Clock:
        """What the session's metadata.json says; a new one where it says nothing sound."""
        try:
            said = json.loads(session.read(METADATA_FILE))["clock"]
            error = said["error_sec"]
            return cls(
                int(said["checkpoints"]),
                float(said["last_sec"]),
                float(said["least_drift_sec"]),
                float(said["most_drift_sec"]),
                None if error is None else float(error),
            )
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return cls()

    def check(self, founding: Founding) -> None:
        """Compare the clocks now."""
        wall, monotonic = _both()
        seconds = (monotonic - founding.origin_ns) / 1e9
        drift = wall / 1e9 - founding.started_at - seconds
        error = kernel_error_sec()
        if self.checkpoints:
            known = self.error_sec is not None and error is not None
            self.error_sec = max(self.error_sec or 0.0, error or 0.0) if known else None
        else:
            self.error_sec = error
        self.checkpoints += 1
        self.last_sec = round(seconds, 6)
        self.least_drift_sec = round(min(self.least_drift_sec, drift), 6)
        self.most_drift_sec = round(max(self.most_drift_sec, drift), 6)

    def content(self) -> dict[str, Any] | None:
        """``clock`` of metadata.json; null where the clocks were never compared."""
        return asdict(self) if self.checkpoints else None


def _both() -> tuple[int, int]:
    """The wall clock and the monotonic clock at one moment, in nanoseconds: of three readings the
    one that took the shortest."""
    readings = []
    for _ in range(3):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, wall, (before + after) // 2))
    _, wall, monotonic = min(readings)
    return wall, monotonic


class _Timex(ctypes.Structure):
    """The beginning of the kernel's ``struct timex`` on 64 bits, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def kernel_error_sec() -> float | None:
    """How far the kernel says that the wall clock may be off, in seconds; None where nothing keeps
    it in time, or where the kernel cannot be asked."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_long) != 8:
        return None
    try:
        # Without modes it only reads, which every user may.
        found = _Timex()
        if ctypes.CDLL(None).adjtimex(ctypes.byref(found)) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return None if found.status & _UNSYNCHRONIZED else found.maxerror / 1e6
