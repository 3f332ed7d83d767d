# SPDX-License-Identifier: Apache-2.0
"""Perfetto's packets: tracks, slices, instants and counters, written as they come.

A trace is a sequence of packets, so it is written in batches, and nothing of it is kept. A text
that comes again is written once, and then named by a number. Now and then all these numbers are
forgotten, here and by the reader (``SEQ_INCREMENTAL_STATE_CLEARED``), so that they take no memory.

Times are whole nanoseconds of the trace's clock. A slice must end before the next one of its track
begins, or lie within it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    BUILTIN_CLOCK_BOOTTIME,
    BUILTIN_CLOCK_REALTIME,
    Trace,
    TracePacket,
    TrackDescriptor,
    TrackEvent,
)

Args = Iterable[tuple[str, Any]]
"""Names and values that are shown beside an event. A value of None is left out."""

_BATCH = 4096
"""Packets that are serialized at once."""

_TEXTS = 50_000
"""Texts that have a number at once."""

_SEQUENCE = 1
"""All packets are of one sequence: numbers of texts are a sequence's own."""

_BEGIN, _END = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END
_INSTANT, _COUNTER = TrackEvent.TYPE_INSTANT, TrackEvent.TYPE_COUNTER


class Packets:
    """Writes packets to a file. ``finish`` writes the last ones."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._trace = Trace()
        self._texts: dict[tuple[str, str], int] = {}
        self._flows = 0
        self._state = TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        self._clear()

    def flow(self) -> int:
        """A number for an arrow, which no other arrow has."""
        self._flows += 1
        return self._flows

    def clock(self, wall_ns: int) -> None:
        """Say that this moment of the trace's clock is the same one of the wall clock."""
        snapshot = self._packet(wall_ns).clock_snapshot
        for clock in (BUILTIN_CLOCK_BOOTTIME, BUILTIN_CLOCK_REALTIME):
            snapshot.clocks.add(clock_id=clock, timestamp=wall_ns)

    def track(
        self,
        uuid: int,
        name: str,
        parent: int | None = None,
        *,
        rank: int | None = None,
        by_time: bool = False,
    ) -> None:
        """Describe a track.

        Args:
            uuid: its number, which no other track has.
            name: what is shown.
            parent: the number of the track that it lies under.
            rank: its place among those that lie under the same one.
            by_time: order those under it by their first event, and not by rank.

        """
        track = self._descriptor(uuid, parent)
        track.name = name
        if rank is not None:
            track.sibling_order_rank = rank
        track.child_ordering = (
            TrackDescriptor.CHRONOLOGICAL if by_time else TrackDescriptor.EXPLICIT
        )
        # Two requests may have the same name, on two engines or one after the other.
        track.sibling_merge_behavior = TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE

    def counter_track(self, uuid: int, name: str, unit: str, parent: int, rank: int) -> None:
        """Describe a track of values with this unit."""
        track = self._descriptor(uuid, parent)
        track.name = name
        track.sibling_order_rank = rank
        track.counter.unit_name = unit

    def begin(
        self, track: int, at_ns: int, name: str, args: Args = (), flows: Sequence[int] = ()
    ) -> None:
        """A slice begins. The same number in the ``flows`` of two events makes an arrow from the
        earlier to the later one."""
        self._event(track, at_ns, _BEGIN, name, args, flows)

    def end(self, track: int, at_ns: int) -> None:
        """The slice that began last on this track, and has not ended, ends."""
        event = self._packet(at_ns).track_event
        event.type, event.track_uuid = _END, track

    def instant(
        self, track: int, at_ns: int, name: str, args: Args = (), flows: Sequence[int] = ()
    ) -> None:
        """Something happens that takes no time."""
        self._event(track, at_ns, _INSTANT, name, args, flows)

    def count(self, track: int, at_ns: int, value: int) -> None:
        """A value holds from this moment on."""
        event = self._packet(at_ns).track_event
        event.type, event.track_uuid, event.counter_value = _COUNTER, track, value

    def finish(self) -> None:
        """Write what has not been written yet."""
        self._file.write(self._trace.SerializeToString())
        # A new one: clearing it would keep its memory.
        self._trace = Trace()

    def _descriptor(self, uuid: int, parent: int | None) -> Any:
        track = self._packet(None).track_descriptor
        track.uuid = uuid
        if parent is not None:
            track.parent_uuid = parent
        return track

    def _event(
        self, track: int, at_ns: int, kind: int, name: str, args: Args, flows: Sequence[int]
    ) -> None:
        if len(self._texts) > _TEXTS:
            self._clear()
        packet = self._packet(at_ns)
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        event.name_iid = self._number(packet, "event_names", name)
        if flows:
            event.flow_ids.extend(flows)
        for label, value in args:
            if value is None:
                continue
            arg = event.debug_annotations.add()
            arg.name_iid = self._number(packet, "debug_annotation_names", label)
            if isinstance(value, str):
                arg.string_value_iid = self._number(packet, "debug_annotation_string_values", value)
            elif isinstance(value, bool):
                arg.bool_value = value
            elif isinstance(value, int):
                arg.int_value = value
            else:
                arg.double_value = value

    def _packet(self, at_ns: int | None) -> Any:
        if len(self._trace.packet) >= _BATCH:
            self.finish()
        packet = self._trace.packet.add()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.sequence_flags = self._state
        if at_ns is not None:
            packet.timestamp = at_ns
        return packet

    def _clear(self) -> None:
        """Forget all numbers of texts, and have the reader do so."""
        self._texts.clear()
        packet = self._packet(None)
        packet.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED

    def _number(self, packet: Any, kind: str, text: str) -> int:
        """The number of a text, which the packet says if it is new."""
        number = self._texts.get((kind, text))
        if number is None:
            number = len(self._texts) + 1
            self._texts[kind, text] = number
            entry = getattr(packet.interned_data, kind).add(iid=number)
            if kind == "debug_annotation_string_values":
                entry.str = text.encode(errors="replace")
            else:
                entry.name = text.encode(errors="replace").decode()
        return number
