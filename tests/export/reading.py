# SPDX-License-Identifier: Apache-2.0
"""Read a trace as Perfetto does: packets in the order of time, texts by their numbers, slices from
their begins and ends, arrows from equal numbers. What breaks a rule of the format is an error."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    BUILTIN_CLOCK_BOOTTIME,
    BUILTIN_CLOCK_REALTIME,
    Trace,
    TracePacket,
    TrackEvent,
)


@dataclass
class Slice:
    """A slice, or an instant, whose end is its begin. ``track``: names from the top down."""

    track: tuple[str, ...]
    name: str
    begin_ns: int
    end_ns: int
    args: dict[str, Any]
    depth: int


@dataclass
class Read:
    """``arrows``: pairs of slices. ``counters``: by track, times and values."""

    tracks: list[tuple[str, ...]] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    instants: list[Slice] = field(default_factory=list)
    arrows: list[tuple[Slice, Slice]] = field(default_factory=list)
    counters: dict[tuple[str, ...], list[tuple[int, int]]] = field(default_factory=dict)
    units: dict[tuple[str, ...], str] = field(default_factory=dict)
    cleared: int = 0
    wall_ns: int | None = None

    def named(self, *names: str) -> list[Slice]:
        """Slices and instants of these names, in the order of time."""
        return [one for one in [*self.slices, *self.instants] if one.name in names]

    def under(self, *names: str) -> list[Slice]:
        """The slices of a track."""
        return [one for one in self.slices if one.track == names]


def read(path: Path) -> Read:
    trace = Trace.FromString(path.read_bytes())
    found = Read()
    tracks: dict[int, Any] = {}
    texts: dict[tuple[str, int], str] = {}
    events: list[tuple[int, int, Any, dict[str, Any]]] = []
    is_known = False
    for number, packet in enumerate(trace.packet):
        assert packet.trusted_packet_sequence_id == 1
        if packet.sequence_flags & TracePacket.SEQ_INCREMENTAL_STATE_CLEARED:
            texts.clear()
            found.cleared += 1
            is_known = True
        assert is_known, "the first packet of a sequence clears its state"
        for kind in ("event_names", "debug_annotation_names", "debug_annotation_string_values"):
            for entry in getattr(packet.interned_data, kind):
                assert (kind, entry.iid) not in texts
                assert entry.iid, "0 is no number of a text"
                is_name = kind != "debug_annotation_string_values"
                texts[kind, entry.iid] = entry.name if is_name else entry.str.decode()
        if packet.HasField("clock_snapshot"):
            clocks = {one.clock_id: one.timestamp for one in packet.clock_snapshot.clocks}
            assert clocks[BUILTIN_CLOCK_BOOTTIME] == packet.timestamp
            found.wall_ns = clocks[BUILTIN_CLOCK_REALTIME]
        elif packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid not in tracks, "a track is described once"
            tracks[track.uuid] = track
        elif packet.HasField("track_event"):
            # Numbers of texts are looked up in the order of the file, before packets are sorted.
            assert packet.sequence_flags & TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
            args = {
                texts["debug_annotation_names", one.name_iid]: _value(one, texts)
                for one in packet.track_event.debug_annotations
            }
            name = texts.get(("event_names", packet.track_event.name_iid), "")
            events.append((packet.timestamp, number, packet.track_event, {"": name, **args}))

    def path_of(uuid: int) -> tuple[str, ...]:
        track = tracks[uuid]
        above = path_of(track.parent_uuid) if track.HasField("parent_uuid") else ()
        return (*above, track.name)

    found.tracks = [path_of(uuid) for uuid in tracks]
    found.units = {
        path_of(uuid): track.counter.unit_name
        for uuid, track in tracks.items()
        if track.HasField("counter")
    }
    _replay(sorted(events, key=lambda one: one[:2]), path_of, found)
    return found


def _value(arg: Any, texts: dict[tuple[str, int], str]) -> Any:
    kind = arg.WhichOneof("value")
    value = getattr(arg, kind)
    return texts["debug_annotation_string_values", value] if kind.endswith("_iid") else value


def _replay(events: list[Any], path_of: Any, found: Read) -> None:
    stacks: dict[int, list[Slice]] = defaultdict(list)
    flows: dict[int, Slice] = {}
    for at, _, event, args in events:
        track = path_of(event.track_uuid)
        if event.type == TrackEvent.TYPE_COUNTER:
            assert track in found.units
            found.counters.setdefault(track, []).append((at, event.counter_value))
            continue
        stack = stacks[event.track_uuid]
        if event.type == TrackEvent.TYPE_SLICE_END:
            stack.pop().end_ns = at
            continue
        name = args.pop("")
        assert name
        one = Slice(track, name, at, at, args, len(stack))
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            found.slices.append(one)
            stack.append(one)
        else:
            assert event.type == TrackEvent.TYPE_INSTANT
            found.instants.append(one)
        for flow in event.flow_ids:
            if flow in flows:
                found.arrows.append((flows[flow], one))
            flows[flow] = one
    assert not any(stacks.values()), "each slice ends"
