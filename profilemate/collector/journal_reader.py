# SPDX-License-Identifier: Apache-2.0
"""Read a journal that may still be growing, and may be damaged.

The reader stops in front of a torn tail. What was damaged later, it leaves out: it finds the next
whole frame, and says what lies between.
"""

from __future__ import annotations

import math
import os
import re
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from profilemate.collector.decode import may_begin
from profilemate.format.errors import SessionError
from profilemate.format.events import FRAME as EVENTS_HEAD
from profilemate.format.events import is_head
from profilemate.format.journal import HEAD, MAGIC, MAX_PAYLOAD, Kind, checksum_of

_ANY_MAGIC = re.compile(rb"profilemate journal (\d{1,9})\n")

_MAX_KIND = 255
"""The highest kind that a newer release may give a frame."""

_KINDS: dict[int, Kind] = {int(kind): kind for kind in Kind}

_KIND = re.compile(b"[\x01-\x04]\x00\x00\x00")
"""A known kind, as it is in a frame."""

READ_BYTES = 1 << 17
"""How much is read at once: the events and rows that come of it are 100 times as much in memory."""

_WINDOW_BYTES = 1 << 20

_SEARCH_BYTES = 1 << 30
"""At most so many bytes are compared with checksums in search of a frame, which takes half a
second."""


class Frame(NamedTuple):
    """A whole frame. ``kind`` is a ``Kind``, or the number of one that a newer release has.
    ``offset`` is where it begins in the file."""

    kind: int
    payload: bytes
    offset: int


class Damage(NamedTuple):
    """Bytes of a journal that are no frames, and that no write under way explains."""

    offset: int
    length: int


class JournalReader:
    """Reads whole frames of a journal that may still be growing.

    ``offset`` is the end of what has been read. What cannot be read there may be a write under
    way, or the torn end of one: it waits, and a later ``read`` tries it again. It is damage, and is
    left out, where whole frames follow behind it at two reads, or where the writer is gone and did
    not just stop in the middle of a frame. ``damage`` has what was left out. ``dir_fd`` is the open
    folder that the journal lies in, where there is one. ``starts`` are where the last frames in
    front of ``offset`` began, where it does not begin at the file's beginning.
    """

    def __init__(
        self,
        path: Path,
        dir_fd: int | None = None,
        offset: int = 0,
        starts: Iterable[int] = (),
    ) -> None:
        self.path = path
        self.offset = offset
        self.damage: list[Damage] = []
        self.starts: deque[int] = deque(starts, maxlen=64)
        self._size = 0
        self._suspected = -1
        self._torn: tuple[int, int] | None = None
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path if dir_fd is None else path.name, flags, dir_fd=dir_fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None

    @property
    def age_sec(self) -> float:
        """How long nothing has been written; infinite for a file that was removed."""
        info = os.fstat(self._fd)
        return time.time() - info.st_mtime if info.st_nlink else math.inf

    @property
    def torn_since(self) -> int | None:
        """The time that the torn frame of events at ``offset`` gives for the frame before it; None
        where there is no such frame, or not so much of it."""
        begun = os.pread(self._fd, HEAD.size + EVENTS_HEAD.size, self.offset)
        if len(begun) < HEAD.size + EVENTS_HEAD.size or HEAD.unpack_from(begun)[2] != Kind.EVENTS:
            return None
        since: int = EVENTS_HEAD.unpack_from(begun, HEAD.size)[0]
        return since

    @property
    def unread(self) -> int:
        """How many bytes the last call of ``read`` left unread."""
        return max(0, self._size - self.offset)

    def read(self, limit: int = READ_BYTES, *, ended: bool = False) -> list[Frame]:
        """The frames that became whole since the last call, about ``limit`` bytes at most.

        ``ended``: the writer was gone before this call.

        Raises:
            SessionError: the journal is of another profilemate.

        """
        self._size = os.fstat(self._fd).st_size
        if self._size < self.offset:
            return self._reread()
        frames = self._frames(limit)
        if not frames and self.unread and self._pass_damage(ended):
            frames = self._frames(limit)
        return frames

    def pass_rest(self) -> None:
        """Leave out what cannot be read: the writer goes on in another file."""
        if self.unread:
            self.damage.append(Damage(self.offset, self.unread))
            self.offset = self._size

    def close(self) -> None:
        os.close(self._fd)

    def _frames(self, limit: int) -> list[Frame]:
        """Read on from ``offset``, as far as there are whole frames."""
        if self.offset == 0 and not self._pass_magic():
            return []
        data = os.pread(self._fd, limit, self.offset)
        if len(data) >= HEAD.size:
            length = HEAD.unpack_from(data)[0]
            if length <= MAX_PAYLOAD and len(data) < HEAD.size + length <= self.unread:
                data = os.pread(self._fd, HEAD.size + length, self.offset)
        frames = list(_whole_frames(data, self.offset))
        if frames:
            self.starts.extend(frame.offset for frame in frames)
            self.offset = frames[-1].offset + HEAD.size + len(frames[-1].payload)
        return frames

    def _pass_magic(self) -> bool:
        magic = os.pread(self._fd, 2 * len(MAGIC), 0)
        if magic.startswith(MAGIC):
            self.offset = len(MAGIC)
            return True
        another = _ANY_MAGIC.match(magic)
        if another:
            raise SessionError(
                f"{self.path.name} is of another profilemate (its journals have version "
                f"{int(another[1])}): read it with that one"
            )
        return False

    def _pass_damage(self, ended: bool) -> bool:
        """Leave out what cannot be read at ``offset``; returns whether that is due."""
        here = self.offset, self._size
        if not ended and self._suspected != self.offset:
            self._suspected = self.offset
            return False
        if self._torn == here:
            return False
        follows = self._next_frame()
        if follows is None:
            if not ended or self._is_torn():
                self._torn = here
                return False
            follows = self._size
        self.damage.append(Damage(self.offset, follows - self.offset))
        self.offset = follows
        return True

    def _is_torn(self) -> bool:
        """Whether a frame begins at ``offset`` whose write was cut short."""
        begun = os.pread(self._fd, len(MAGIC), self.offset)
        if self.offset == 0:
            return MAGIC.startswith(begun)
        if len(begun) < HEAD.size:
            return True
        length, checksum, kind = HEAD.unpack_from(begun)
        there = self.unread - HEAD.size
        if not (0 < kind <= _MAX_KIND and there < length <= MAX_PAYLOAD):
            return False
        if kind == Kind.HEADER and self.offset != len(MAGIC):
            return False
        payload = os.pread(self._fd, _WINDOW_BYTES, self.offset + HEAD.size)
        if kind in (Kind.HEADER, Kind.STATUS, Kind.END) and b"\0" in payload:
            # JSON has no NUL, and what follows it has.
            return False
        if kind == Kind.EVENTS and not may_begin(payload, length):
            return False
        # If all of the payload is there, its length is what was damaged.
        whole: bool = self._checksum_at(self.offset + HEAD.size, there, kind) == checksum
        return not whole

    def _next_frame(self) -> int | None:
        """Where the next whole frame begins behind ``offset``; None if there is none.

        No text of a client can pass for one: it is in the journal as JSON, which has no NUL, and
        a kind has three of them.
        """
        left = _SEARCH_BYTES
        at = self.offset + 1
        while at + HEAD.size <= self._size:
            window = os.pread(self._fd, _WINDOW_BYTES, at)
            for match in _KIND.finditer(window, HEAD.size - 4):
                begin = match.start() - HEAD.size + 4
                length, checksum, kind = HEAD.unpack_from(window, begin)
                payload = at + begin + HEAD.size
                if payload + length > self._size or not self._is_likely(kind, payload, length):
                    continue
                left -= length
                if left < 0:
                    return None
                if self._checksum_at(payload, length, kind) == checksum:
                    return at + begin
            if len(window) < _WINDOW_BYTES:
                break
            at += len(window) - HEAD.size + 1
        return None

    def _is_likely(self, kind: int, payload: int, length: int) -> bool:
        """Whether these bytes begin as the payload of this kind does."""
        if kind == Kind.EVENTS:
            return is_head(os.pread(self._fd, min(length, EVENTS_HEAD.size), payload))
        return os.pread(self._fd, min(length, 1), payload) == b"{"

    def _checksum_at(self, begin: int, length: int, kind: int) -> int:
        checksum, end = checksum_of(kind, b""), begin + length
        while begin < end:
            part = os.pread(self._fd, min(_WINDOW_BYTES, end - begin), begin)
            if not part:
                break
            checksum = zlib.adler32(part, checksum)
            begin += len(part)
        return checksum

    def _reread(self) -> list[Frame]:
        """The writer ran out of disk, and said so in place of its last frames.

        All other frames have been read before.
        """
        while self.starts:
            self.offset = self.starts.pop()
            if self.offset < self._size:
                data = os.pread(self._fd, self._size - self.offset, self.offset)
                frames = list(_whole_frames(data, self.offset))
                if sum(HEAD.size + len(frame.payload) for frame in frames) == len(data):
                    self.starts.append(self.offset)
                    self.offset = self._size
                    return [frame for frame in frames if frame.kind in (Kind.STATUS, Kind.END)]
        self.damage.append(Damage(self._size, 0))
        self.offset = self._size
        return []


def _whole_frames(data: bytes, offset: int) -> Iterator[Frame]:
    """The whole frames that the data, which lies at this offset of the file, begins with."""
    position = 0
    while position + HEAD.size <= len(data):
        length, checksum, kind = HEAD.unpack_from(data, position)
        start = position + HEAD.size
        if not 0 < kind <= _MAX_KIND or start + length > len(data):
            return
        payload = data[start : start + length]
        if checksum_of(kind, payload) != checksum:
            return
        yield Frame(_KINDS.get(kind, kind), payload, offset + position)
        position = start + length
