# SPDX-License-Identifier: Apache-2.0
"""A trace of torch's profiler, put beside the session on one clock.

torch writes times in microseconds after ``baseTimeNanoseconds``, which is a time since 1970. Slices
of a thread lie within each other; one that does not fit into the others gets another track.
"""

from __future__ import annotations

import gzip
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from analysis.errors import SessionError
from analysis.export.clock import Clock
from analysis.export.part import Part
from analysis.export.perfetto.packets import Packets
from analysis.export.perfetto.tracks import Tracks

_RANK = 4000
_Thread = tuple[Any, Any]


def write(path: Path, part: Part, packets: Packets, tracks: Tracks, clock: Clock) -> int:
    """Write the profile's slices that are within this part's limits of time; returns how many.

    Raises:
        SessionError: it cannot be read, is no such trace, or is of another time.

    """
    trace = _read(path)
    base = int(trace["baseTimeNanoseconds"])
    events = [event for event in trace["traceEvents"] if isinstance(event, dict)]
    names = _names(events)
    arrows = _arrows(events, packets)
    threads: dict[_Thread, list[tuple[int, int, dict[str, Any]]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and _is_time(event.get("ts")):
            begin = base + round(event["ts"] * 1000)
            end = begin + (round(event["dur"] * 1000) if _is_time(event.get("dur")) else 0)
            if _is_within(begin, end, part, clock):
                threads[event.get("pid"), event.get("tid")].append((begin, end, event))
    if not threads:
        raise SessionError(
            f"{path}: nothing in it is of the time that is exported; name a profile of the same run"
        )
    for (pid, tid), slices in threads.items():
        above = tracks.top(f"torch: {names.get((pid, None), '')} {pid}".replace("  ", " "), _RANK)
        name = names.get((pid, tid)) or f"thread {tid}"
        for lane, lying in enumerate(_lanes(slices)):
            track = tracks.under(above, tid, name, lane)
            for at, began in lying:
                if began is None:
                    packets.end(track, at)
                else:
                    flows = arrows.get((pid, tid, began["ts"]), [])
                    packets.begin(track, at, str(began.get("name")), _args(began), flows)
    return sum(map(len, threads.values()))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        trace = orjson.loads(content)
    except (OSError, EOFError, zlib.error) as error:
        said = getattr(error, "strerror", None) or error
        raise SessionError(f"cannot read {path}: {said}; name a trace of torch's") from None
    except ValueError:
        raise SessionError(f"{path} is not JSON; name a trace of torch's profiler") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise SessionError(f"{path} has no traceEvents; name a trace of torch's profiler")
    if not isinstance(trace.get("baseTimeNanoseconds"), int):
        raise SessionError(
            f"{path} has no baseTimeNanoseconds, so its clock is not known; record it with a torch "
            "that writes it"
        )
    return trace


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _is_within(begin: int, end: int, part: Part, clock: Clock) -> bool:
    after = part.begin_sec is None or end >= clock.ns(part.begin_sec)
    return after and (part.end_sec is None or begin < clock.ns(part.end_sec))


def _names(events: list[dict[str, Any]]) -> dict[tuple[Any, Any], str]:
    """Of processes, under their number and None, and of threads."""
    found = {}
    for event in events:
        args = event.get("args")
        if event.get("ph") == "M" and isinstance(args, dict):
            if event.get("name") == "process_name":
                found[event.get("pid"), None] = str(args.get("name"))
            elif event.get("name") == "thread_name":
                found[event.get("pid"), event.get("tid")] = str(args.get("name"))
    return found


def _arrows(
    events: list[dict[str, Any]], packets: Packets
) -> dict[tuple[Any, Any, Any], list[int]]:
    """The numbers of the arrows that begin or end with the slice that begins there and then: torch
    leads them from a launch to its kernel."""
    numbers: dict[tuple[Any, Any], int] = defaultdict(packets.flow)
    found = defaultdict(list)
    for event in events:
        if event.get("ph") in ("s", "t", "f"):
            number = numbers[event.get("cat"), event.get("id")]
            found[event.get("pid"), event.get("tid"), event.get("ts")].append(number)
    return found


def _lanes(
    slices: list[tuple[int, int, dict[str, Any]]],
) -> Iterator[list[tuple[int, dict[str, Any] | None]]]:
    """Begins, with their events, and ends, in their order, so that all slices of a list are within
    each other."""
    left = sorted(slices, key=lambda each: (each[0], -each[1]))
    while left:
        lying: list[tuple[int, dict[str, Any] | None]] = []
        open_until: list[int] = []
        beside = []
        for begin, end, event in left:
            while open_until and open_until[-1] <= begin:
                lying.append((open_until.pop(), None))
            if open_until and end > open_until[-1]:
                beside.append((begin, end, event))
                continue
            lying.append((begin, event))
            open_until.append(end)
        lying += [(until, None) for until in reversed(open_until)]
        yield lying
        left = beside


def _args(event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "category", event.get("cat")
    args = event.get("args")
    for name, value in args.items() if isinstance(args, dict) else ():
        if isinstance(value, (str, bool, float)) or (
            isinstance(value, int) and -(2**63) <= value < 2**63
        ):
            yield name, value
