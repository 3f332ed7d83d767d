# SPDX-License-Identifier: Apache-2.0
"""The journal: an append-only file of checksummed frames, one file a producer.

A file begins with ``MAGIC``. Each frame is its payload's length, the Adler-32 of its kind and
payload, its kind, and the payload. A frame goes out in one ``os.write``, so a process that is
killed loses at most the frame it was writing; the reader stops in front of such a torn tail.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

MAGIC = b"profilemate journal 1\n"
_FRAME = struct.Struct("<III")
MAX_PAYLOAD = 1 << 30


class Kind(IntEnum):
    """What a frame's payload is."""

    HEADER = 1
    """JSON: who writes this journal, and the configuration of its engine. Always the first."""
    EVENTS = 2
    """Events, laid out as profilemate.events says."""
    STATUS = 3
    """JSON: what changed about the producer: hooks lost, events dropped, its cost."""
    END = 4
    """JSON: as STATUS, and nothing follows: the producer ended in good order."""


def frame(kind: Kind, payload: bytes) -> bytes:
    """A frame, ready to be written."""
    return _FRAME.pack(len(payload), _checksum(kind, payload), kind) + payload


def _checksum(kind: int, payload: bytes) -> int:
    # A CRC's tables are not in the processor's caches when a step ends; this needs none.
    return zlib.adler32(payload, kind)


class JournalError(Exception):
    """The file is not a journal that this release can read."""


class JournalReader:
    """Reads whole frames of a journal that may still be growing.

    ``offset`` is the end of the last whole frame that was read. A tail that is torn or does not
    match its checksum is left alone: a later ``read`` tries it again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def read(self, limit: int = 1 << 18) -> list[tuple[Kind, bytes]]:
        """The frames that became whole since the last call, about ``limit`` bytes at most.

        Raises:
            JournalError: the file does not begin as a journal does.

        """
        if self.offset == 0:
            magic = os.pread(self._fd, len(MAGIC), 0)
            if len(magic) < len(MAGIC) and MAGIC.startswith(magic):
                return []
            if magic != MAGIC:
                raise JournalError(f"{self.path} is not a profilemate journal")
            self.offset = len(MAGIC)
        if os.fstat(self._fd).st_size < self.offset:
            return self._reread()
        data = os.pread(self._fd, limit, self.offset)
        if len(data) >= _FRAME.size:
            length = _FRAME.unpack_from(data)[0]
            if length <= MAX_PAYLOAD and len(data) < _FRAME.size + length:
                data = os.pread(self._fd, _FRAME.size + length, self.offset)
        frames = list(_whole_frames(data))
        self.offset += sum(_FRAME.size + len(payload) for _, payload in frames)
        return frames

    def _reread(self) -> list[tuple[Kind, bytes]]:
        """The writer ran out of disk, and said so in the place of its last frames.

        Those have been read before, and so has all else but what it says.
        """
        self.offset = os.fstat(self._fd).st_size
        data = os.pread(self._fd, self.offset, len(MAGIC))
        return [(kind, told) for kind, told in _whole_frames(data) if kind >= Kind.STATUS]

    def close(self) -> None:
        os.close(self._fd)


def _whole_frames(data: bytes) -> Iterator[tuple[Kind, bytes]]:
    position = 0
    while position + _FRAME.size <= len(data):
        length, checksum, kind = _FRAME.unpack_from(data, position)
        start = position + _FRAME.size
        payload = data[start : start + length]
        if len(payload) < length or _checksum(kind, payload) != checksum:
            return
        yield Kind(kind), payload
        position = start + length
