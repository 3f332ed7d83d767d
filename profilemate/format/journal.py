# SPDX-License-Identifier: Apache-2.0
"""The journal: an append-only file of checksummed frames, one file a producer.

A file begins with ``MAGIC``. Each frame is its payload's length, the Adler-32 of its kind and
payload, its kind, and the payload. A frame goes out in one ``os.write``, so a process that is
killed loses at most the frame it was writing; the reader stops in front of such a torn tail.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import time
import zlib
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

from profilemate.format.errors import SessionError

MAGIC = b"profilemate journal 1\n"
_FRAME = struct.Struct("<III")
MAX_PAYLOAD = 1 << 30

ROOM_BYTES = 512
"""What a full disk must have room for: a frame that says so."""


class Kind(IntEnum):
    """What a frame's payload is."""

    HEADER = 1
    """JSON: who writes this journal, and the configuration of its engine. Always the first."""
    EVENTS = 2
    """Events, laid out as profilemate.format.events says."""
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


class JournalWriter:
    """Appends frames to a journal. The file descriptor is the writer's from now on.

    ``size`` is the length of the whole frames. A full disk ends the journal. How much is lost from
    then on can still be written, if need be in place of the last frames; ``has_room`` says that
    these were given up.
    """

    def __init__(self, fd: int) -> None:
        self.size = 0
        self.has_room = False
        self._fd = fd
        self._last_frames: deque[tuple[int, int]] = deque(maxlen=16)

    def append(self, data: bytes, events: int = 0) -> None:
        """Write all of the data, or nothing; ``events`` is how many events it holds.

        Raises:
            OSError: it could not be written.

        """
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            # A torn frame would hide all later ones from the reader.
            self._cut_back()
            raise
        if self.size:
            self._last_frames.append((self.size, events))
        self.size += len(data)

    def make_room(self) -> int:
        """Give up the last frames, so that ``ROOM_BYTES`` are free; returns their events."""
        end, events = self.size, 0
        while self._last_frames and end - self.size < ROOM_BYTES:
            self.size, given_up = self._last_frames.pop()
            events += given_up
        self.has_room = True
        return events

    def put_last(self, data: bytes) -> None:
        """Write this behind the whole frames; the next call replaces it. Never raises OSError."""
        self._cut_back()
        size = self.size
        with contextlib.suppress(OSError):
            self.append(data)
        self.size = size

    def _cut_back(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self.size)

    @property
    def is_closed(self) -> bool:
        return self._fd < 0

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class JournalReader:
    """Reads whole frames of a journal that may still be growing.

    ``offset`` is the end of the last whole frame that was read. A tail that is torn or does not
    match its checksum waits: a later ``read`` tries it again. ``dir_fd`` is the open folder that it
    lies in, where there is one.
    """

    def __init__(self, path: Path, dir_fd: int | None = None) -> None:
        self.path = path
        self.offset = 0
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path if dir_fd is None else path.name, flags, dir_fd=dir_fd)

    @property
    def age_sec(self) -> float:
        """How long nothing has been written; infinite for a file that was removed."""
        info = os.fstat(self._fd)
        return time.time() - info.st_mtime if info.st_nlink else math.inf

    def read(self, limit: int = 1 << 18) -> list[tuple[Kind, bytes]]:
        """The frames that became whole since the last call, about ``limit`` bytes at most.

        Raises:
            SessionError: the file does not begin as a journal does.

        """
        if self.offset == 0:
            magic = os.pread(self._fd, len(MAGIC), 0)
            if len(magic) < len(MAGIC) and MAGIC.startswith(magic):
                return []
            if magic != MAGIC:
                raise SessionError(f"{self.path} is not a profilemate journal")
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
        """The writer ran out of disk, and said so in place of its last frames.

        All other frames have been read before.
        """
        self.offset = os.fstat(self._fd).st_size
        data = os.pread(self._fd, self.offset, len(MAGIC))
        return [frame for frame in _whole_frames(data) if frame[0] >= Kind.STATUS]

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
