# SPDX-License-Identifier: Apache-2.0
"""Does each process of a session still record?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis.tables.metadata import part, parts, text
from analysis.tables.pauses import paused_now
from analysis.wording.formats import duration
from profilemate.live.reading import Process

_RESUME = "'profilemate resume' goes on"


def notes(processes: Sequence[Process], metadata: Mapping[str, Any]) -> Iterator[str]:
    """What there is to say of processes that do not record.

    Args:
        processes: of the last look.
        metadata: the session's, for why a recording stopped.

    """
    for process in processes:
        if process.recording == "stopped":
            why = _why(process, metadata)
            yield (
                f"the recording of {_name(process)} has stopped{why}: its figures are of before "
                "that, and it does not begin again"
            )
    paused = [each for each in processes if each.paused_since_ns is not None]
    if paused:
        since = min(each.paused_since_ns or 0 for each in paused) / 1e9
        yield (
            f"the recording of {' and '.join(map(_name, paused))} is paused since "
            f"{duration(since)} of the session: {_RESUME}"
        )
    elif any(each.recording is None for each in processes) and (names := paused_now(metadata)):
        yield f"the recording of {' and '.join(names)} is paused: {_RESUME}"


def paused_since(processes: Sequence[Process], rank: int) -> float | None:
    """Since when an engine's recording is paused, in seconds of the session; None where it is
    not."""
    for process in processes:
        if (process.role, process.rank) == ("engine", rank) and process.paused_since_ns is not None:
            return process.paused_since_ns / 1e9
    return None


def _name(process: Process) -> str:
    return f"{process.role} {process.rank}"


def _why(process: Process, metadata: Mapping[str, Any]) -> str:
    for known in parts(metadata, "processes"):
        if (known.get("role"), known.get("rank")) == (process.role, process.rank):
            failed = part(known, "hooks_failed")
            said = [f"{where}: {text(reason)}" for where, reason in failed.items() if text(reason)]
            return f" ({'; '.join(said)})" if said else ""
    return ""
