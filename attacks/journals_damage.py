# SPDX-License-Identifier: Apache-2.0
"""Ways to damage a journal's bytes, and ways to forge its frames."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from profilemate.format.events import FRAME
from profilemate.format.journal import HEAD, MAGIC, Kind

_EVENTS = 2

_COUNTS = (0, 1, 2, 255, 1 << 15, (1 << 16) - 1, 1 << 31, (1 << 32) - 1)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1 << 31,
    2_000_000_000,
    1 << 63,
    1 << 80,
    1.5,
    -1e300,
    "",
    "x",
    "=1+1",
    'a,"b\nc\u2028',
    "\ud800",
    "x" * 5_000,
    "9" * 5_000,
    [],
    {},
    [[]],
    [None],
    {"blocks": 1},
    [1 << 40, "a"],
)
_RAW = (
    b"",
    b"{",
    b"null",
    b"[]",
    b"1",
    b'"x"',
    b"\xff\xfe",
    b"{}",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"rank":NaN}',
    b'{"hook_ns":1e999}',
    b'{"bytes":' + b"9" * 5_000 + b"}",
)


@dataclass(frozen=True)
class Journal:
    """A journal's bytes, and other journals to take frames from."""

    data: bytes
    others: list[bytes]


def frames_of(data: bytes) -> list[tuple[int, int]]:
    """Where each frame begins and ends, as far as they are whole."""
    at, found = len(MAGIC), []
    while at + HEAD.size <= len(data):
        end = at + HEAD.size + HEAD.unpack_from(data, at)[0]
        if end > len(data):
            break
        found.append((at, end))
        at = end
    return found


def cut(journal: Journal, chance: random.Random) -> bytes:
    return journal.data[: chance.randrange(len(journal.data) + 1)]


def flip_bit(journal: Journal, chance: random.Random) -> bytes:
    data = bytearray(journal.data or b"\0")
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def set_byte(journal: Journal, chance: random.Random) -> bytes:
    data = bytearray(journal.data or b"\0")
    data[chance.randrange(len(data))] = chance.choice((0, 1, 2, 0x7F, 0x80, 0xFF))
    return bytes(data)


def zero_page(journal: Journal, chance: random.Random) -> bytes:
    begin, end = _range(journal.data, chance)
    return journal.data[:begin] + bytes(end - begin) + journal.data[end:]


def zeros_behind(journal: Journal, chance: random.Random) -> bytes:
    return journal.data + bytes(chance.randrange(1, 5_000))


def noise(journal: Journal, chance: random.Random) -> bytes:
    begin, end = _range(journal.data, chance)
    return journal.data[:begin] + chance.randbytes(end - begin) + journal.data[end:]


def lose_bytes(journal: Journal, chance: random.Random) -> bytes:
    begin, end = _range(journal.data, chance)
    return journal.data[:begin] + journal.data[end:]


def write_bytes_twice(journal: Journal, chance: random.Random) -> bytes:
    begin, end = _range(journal.data, chance)
    return journal.data[:end] + journal.data[begin:]


def write_frame_twice(journal: Journal, chance: random.Random) -> bytes:
    frames = _split(journal.data)
    frame = chance.choice(frames[1:] or frames)
    frames.insert(chance.randrange(1, len(frames) + 1), frame)
    return b"".join(frames)


def swap_frames(journal: Journal, chance: random.Random) -> bytes:
    frames = _split(journal.data)
    one, other = chance.randrange(len(frames)), chance.randrange(len(frames))
    frames[one], frames[other] = frames[other], frames[one]
    return b"".join(frames)


def lose_frames(journal: Journal, chance: random.Random) -> bytes:
    frames = _split(journal.data)
    begin = chance.randrange(len(frames))
    del frames[begin : begin + chance.choice((1, 1, 1, 2, 5))]
    return b"".join(frames)


def take_frame_of_another(journal: Journal, chance: random.Random) -> bytes:
    frames = _split(journal.data)
    stranger = chance.choice(_split(chance.choice(journal.others)))
    frames.insert(chance.randrange(1, len(frames) + 1), stranger)
    return b"".join(frames)


def end_as_another(journal: Journal, chance: random.Random) -> bytes:
    # A journal with another's header is that other one.
    frames, others = _split(journal.data), _split(chance.choice(journal.others))
    begin = chance.randrange(2, max(3, len(frames)))
    return b"".join(frames[:begin] + others[begin:])


def huge_length(journal: Journal, chance: random.Random) -> bytes:
    return _with_frame_field(journal.data, chance, 0)


def other_checksum(journal: Journal, chance: random.Random) -> bytes:
    return _with_frame_field(journal.data, chance, 4)


def other_kind(journal: Journal, chance: random.Random) -> bytes:
    return _with_frame_field(journal.data, chance, 8)


def other_version(journal: Journal, chance: random.Random) -> bytes:
    version = chance.choice((b"0", b"2", b"10", b"x", b"999999999999"))
    return MAGIC[:-2] + version + b"\n" + journal.data[len(MAGIC) :]


DAMAGES: tuple[Callable[[Journal, random.Random], bytes], ...] = (
    cut,
    flip_bit,
    flip_bit,
    flip_bit,
    set_byte,
    zero_page,
    zeros_behind,
    noise,
    lose_bytes,
    write_bytes_twice,
    write_frame_twice,
    swap_frames,
    lose_frames,
    take_frame_of_another,
    end_as_another,
    huge_length,
    other_checksum,
    other_kind,
    other_version,
)


def forge_bits(journal: Journal, chance: random.Random) -> bytes:
    def change(payload: bytes) -> bytes:
        data = bytearray(payload or b"\0")
        for _ in range(chance.choice((1, 1, 3, 20))):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        return bytes(data)

    return _forged(journal.data, chance, change)


def forge_count(journal: Journal, chance: random.Random) -> bytes:
    """One of the numbers of an events frame's head, or its typecodes."""

    def change(payload: bytes) -> bytes:
        if len(payload) < FRAME.size:
            return payload
        head = list(FRAME.unpack_from(payload))
        place = chance.randrange(len(head))
        if place == 0:
            head[0] = chance.choice((0, -1, 1 << 62, head[0] + 1, head[0] - 1, -(1 << 63)))
        elif place == len(head) - 1:
            head[place] = bytes(chance.choice(b"HIqQfdu\0") for _ in range(4))
        else:
            head[place] = chance.choice((*_COUNTS, max(0, head[place] - 1), head[place] + 1))
        return FRAME.pack(*head) + payload[FRAME.size :]

    return _forged(journal.data, chance, change, kind=_EVENTS)


def forge_number(journal: Journal, chance: random.Random) -> bytes:
    """A value in one of an events frame's columns."""

    def change(payload: bytes) -> bytes:
        data = bytearray(payload)
        width = chance.choice((1, 2, 4, 8))
        if len(data) < FRAME.size + width:
            return payload
        value = chance.choice(_COUNTS) % (1 << 8 * width)
        at = chance.randrange(FRAME.size, len(data) - width + 1)
        data[at : at + width] = value.to_bytes(width, "little")
        return bytes(data)

    return _forged(journal.data, chance, change, kind=_EVENTS)


def forge_op(journal: Journal, chance: random.Random) -> bytes:
    def change(payload: bytes) -> bytes:
        data = bytearray(payload)
        count = FRAME.unpack_from(payload)[1] if len(payload) >= FRAME.size else 0
        if 0 < count <= len(data) - FRAME.size:
            data[FRAME.size + chance.randrange(count)] = chance.randrange(256)
        return bytes(data)

    return _forged(journal.data, chance, change, kind=_EVENTS)


def forge_json(journal: Journal, chance: random.Random) -> bytes:
    """A value in a header or a status becomes another one, mostly of another type."""

    def change(payload: bytes) -> bytes:
        try:
            found = json.loads(payload)
        except (ValueError, RecursionError):
            return payload
        value = chance.choice(_VALUES)
        if chance.random() < 0.05:
            for _ in range(200):
                value = [value]
        parent: Any = found
        while isinstance(parent, (dict, list)) and parent:
            keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
            key = chance.choice(keys)
            if not isinstance(parent[key], (dict, list)) or chance.random() < 0.3:
                if chance.random() < 0.15:
                    del parent[key]
                else:
                    parent[key] = value
                break
            parent = parent[key]
        return json.dumps(found).encode()

    return _forged(journal.data, chance, change, kind=chance.choice((1, 1, 3, 4)))


def forge_text(journal: Journal, chance: random.Random) -> bytes:
    """A header or a status becomes something that is none."""
    raw = chance.choice(_RAW)
    return _forged(journal.data, chance, lambda _: raw, kind=chance.choice((1, 3, 4)))


def forge_description(journal: Journal, chance: random.Random) -> bytes:
    """The JSON of a request, an entry or a batch becomes another of the same length."""

    def change(payload: bytes) -> bytes:
        begin = payload.find(b'["')
        end = payload.find(b"]", begin) + 1
        if begin < 0 or not end:
            return payload
        length = end - begin
        texts = (
            b"[" * length,
            b"{}".ljust(length),
            b"[null,true,1,1]".ljust(length)[:length],
            b'["a,b",-5,1,1]'.ljust(length)[:length],
            b"[1,2,3]".ljust(length)[:length],
            b'["\\n",99999999]'.ljust(length)[:length],
            b"\xff" * length,
        )
        return payload[:begin] + chance.choice(texts) + payload[end:]

    return _forged(journal.data, chance, change, kind=_EVENTS)


def forge_kind(journal: Journal, chance: random.Random) -> bytes:
    """A frame of a kind that it is not, or that no release has yet."""
    data = journal.data
    frames = frames_of(data)
    if not frames:
        return data
    begin, end = chance.choice(frames)
    kind = chance.choice((0, 1, 2, 3, 4, 5, 7, 200, 70_000, 1 << 31))
    return data[:begin] + _frame(kind, data[begin + HEAD.size : end]) + data[end:]


def forge_length(journal: Journal, chance: random.Random) -> bytes:
    """A payload with bytes more or less."""

    def change(payload: bytes) -> bytes:
        if chance.random() < 0.5:
            return payload[: chance.randrange(len(payload) + 1)]
        return payload + chance.randbytes(chance.randrange(1, 40))

    return _forged(journal.data, chance, change)


FORGERIES: tuple[Callable[[Journal, random.Random], bytes], ...] = (
    forge_bits,
    forge_count,
    forge_number,
    forge_number,
    forge_number,
    forge_op,
    forge_json,
    forge_json,
    forge_text,
    forge_description,
    forge_kind,
    forge_length,
)


def _frame(kind: int, payload: bytes) -> bytes:
    return HEAD.pack(len(payload), zlib.adler32(payload, kind & 0xFFFFFFFF), kind) + payload


def _forged(
    data: bytes, chance: random.Random, change: Callable[[bytes], bytes], kind: int | None = None
) -> bytes:
    """The journal with the payload of one frame changed, and its checksum right."""
    frames = [
        (begin, end, found)
        for begin, end in frames_of(data)
        if kind in (None, found := HEAD.unpack_from(data, begin)[2])
    ]
    if not frames:
        return data
    begin, end, found = chance.choice(frames)
    return data[:begin] + _frame(found, change(data[begin + HEAD.size : end])) + data[end:]


def _with_frame_field(data: bytes, chance: random.Random, offset: int) -> bytes:
    frames = frames_of(data)
    if not frames:
        return data
    at = chance.choice(frames)[0] + offset
    return data[:at] + struct.pack("<I", chance.choice(_COUNTS)) + data[at + 4 :]


def _range(data: bytes, chance: random.Random) -> tuple[int, int]:
    begin = chance.randrange(len(data) + 1)
    length = chance.choice((1, 2, 4, 12, 64, 512, 4_096))
    return begin, min(len(data), begin + length)


def without_status(data: bytes) -> bytes:
    """The journal without its whole frames that say how the recording goes."""
    frames = frames_of(data)
    kept = [data[:begin] for begin, _ in frames[:1]]
    kept += [
        data[begin:end] for begin, end in frames if HEAD.unpack_from(data, begin)[2] != Kind.STATUS
    ]
    return b"".join(kept) + data[frames[-1][1] :] if frames else data


def _split(data: bytes) -> list[bytes]:
    """The beginning and each frame; what is behind the last one is its part."""
    ends = [end for _, end in frames_of(data)]
    if not ends:
        return [data]
    begins = [0, len(MAGIC), *ends[:-1]]
    ends = [len(MAGIC), *ends[:-1], len(data)]
    return [data[begin:end] for begin, end in zip(begins, ends, strict=True)]
