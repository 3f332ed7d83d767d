# SPDX-License-Identifier: Apache-2.0
"""The journal: an append-only file of checksummed frames, one file a producer.

A file begins with ``MAGIC``. Each frame is its payload's length, the Adler-32 of its kind and
payload, its kind, and the payload. A frame goes out in one ``os.write``, so a process that is
killed loses at most the frame it was writing; the reader stops in front of such a torn tail. What
was damaged later, it leaves out: it finds the next whole frame, and says what lies between.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import stat
import struct
import time
import zlib
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from profilemate.format.errors import SessionError
from profilemate.format.events import FRAME as EVENTS_HEAD
from profilemate.format.events import is_head

MAGIC = b"profilemate journal 1\n"
_ANY_MAGIC = re.compile(rb"profilemate journal (\d{1,9})\n")
_FRAME = struct.Struct("<III")
MAX_PAYLOAD = 1 << 30

_MAX_KIND = 255
"""The highest kind that a newer release may give a frame."""

_KIND = re.compile(b"[\x01-\x04]\x00\x00\x00")
"""A known kind, as it is in a frame."""

_WINDOW_BYTES = 1 << 20

_SEARCH_BYTES = 1 << 30
"""At most so many bytes are compared with checksums in search of a frame, which takes half a
second."""

ROOM_BYTES = 512
"""What a full disk must have room for: a frame that says so."""

HIGH_FD = 512
"""The lowest number of a journal's descriptor, where as many are allowed."""


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


_KINDS: dict[int, Kind] = {int(kind): kind for kind in Kind}


def frame(kind: Kind, payload: bytes) -> bytes:
    """A frame, ready to be written."""
    return _FRAME.pack(len(payload), _checksum(kind, payload), kind) + payload


def _checksum(kind: int, payload: bytes) -> int:
    # A CRC's tables are not in the processor's caches when a step ends; this needs none.
    return zlib.adler32(payload, kind)


class JournalWriter:
    """Appends frames to a journal. The file descriptor is the writer's from now on.

    ``size`` is the length of the whole frames, ``events`` how many events they hold. Both say what
    is in the file even where something interrupted a write: see ``settle``.

    The application may close all its descriptors, and get their numbers for files of its own. So
    before each write the writer looks whether the number is still the journal's, and opens the
    journal by its ``path`` where it is not.

    A full disk ends the journal. How much is lost from then on can still be written, if need be in
    place of the last frames; ``given_up`` counts their events, and ``has_room`` says that they
    were given up.
    """

    def __init__(self, fd: int, path: Path | None = None) -> None:
        self.size = 0
        self.events = 0
        self.given_up = 0
        self.has_room = False
        self._fd = _out_of_the_way(fd)
        self._path = path
        info = os.fstat(self._fd)
        self._identity = _identity(info)
        self._is_regular = stat.S_ISREG(info.st_mode)
        # Some file systems count no links.
        self._is_linked = info.st_nlink > 0
        self._under_way: tuple[int, int] | None = None
        self._last_frames: deque[tuple[int, int]] = deque(maxlen=16)

    def append(self, data: bytes, events: int = 0) -> None:
        """Write all of the data, or nothing; ``events`` is how many events it holds.

        Raises:
            OSError: it could not be written.

        """
        self.settle()
        self._under_way = self.size + len(data), events
        try:
            self._write(data)
        except OSError:
            # A torn frame would hide all later ones from the reader.
            self._cut_back()
            self._under_way = None
            raise
        self._count()

    def settle(self) -> None:
        """Count a write that something interrupted if it was done, else take it back.

        Raises:
            OSError: the journal cannot be written any more.

        """
        if self._under_way is not None:
            if self._look().st_size >= self._under_way[0]:
                self._count()
            else:
                self._cut_back()
                self._under_way = None

    def make_room(self) -> None:
        """Give up the last frames, so that ``ROOM_BYTES`` are free."""
        end = self.size
        while self._last_frames and end - self.size < ROOM_BYTES:
            size, events = self._last_frames[-1]
            if size < self.size:
                self.size, self.given_up = size, self.given_up + events
            self._last_frames.pop()
        self.has_room = True

    def put_last(self, data: bytes) -> None:
        """Write this behind the whole frames; the next call replaces it. Never raises OSError."""
        with contextlib.suppress(OSError):
            self.settle()
            self._cut_back()
            try:
                self._write(data)
            except OSError:
                self._cut_back()

    @property
    def is_closed(self) -> bool:
        return self._fd < 0

    def close(self) -> None:
        """Close the file. Never raises."""
        fd, self._fd = self._fd, -1
        with contextlib.suppress(Exception):
            if self._is_journal(fd):
                os.close(fd)

    def _write(self, data: bytes) -> None:
        info = self._look()
        if self._is_linked and not info.st_nlink:
            raise OSError(errno.ENOENT, "it has been deleted")
        if self._is_regular and info.st_size < self.size:
            raise OSError(errno.EIO, "something has cut it short")
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def _count(self) -> None:
        """The write that is under way is done."""
        assert self._under_way is not None
        size, events = self._under_way
        if self.size:
            self._last_frames.append((self.size, events))
        # In one line, so that nothing can come between.
        self.size, self.events, self._under_way = size, self.events + events, None

    def _cut_back(self) -> None:
        with contextlib.suppress(OSError):
            if self._look().st_size > self.size:
                os.ftruncate(self._fd, self.size)

    def _look(self) -> os.stat_result:
        """What the system says of the journal, whose descriptor is open from here on."""
        if self._fd < 0:
            raise OSError(errno.EBADF, "it has ended")
        if not self._is_journal(self._fd):
            self._open_again()
        return os.fstat(self._fd)

    def _is_journal(self, fd: int) -> bool:
        try:
            return _identity(os.fstat(fd)) == self._identity
        except OSError:
            return False

    def _open_again(self) -> None:
        if self._path is None:
            raise OSError(errno.EBADF, "the application closed it")
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            reason = f"the application closed it, and to open it again failed: {error.strerror}"
            raise OSError(error.errno, reason) from None
        if not self._is_journal(fd):
            os.close(fd)
            raise OSError(errno.EBADF, "the application closed it, and another is in its place")
        self._fd = _out_of_the_way(fd)


def _identity(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def _out_of_the_way(fd: int) -> int:
    """The same file under a high number, where there is one.

    Who opens a file gets the lowest number that is free. So if the application closes a number
    that it does not know, nothing of its own soon has that number.
    """
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)
    except OSError:
        return fd
    os.close(fd)
    return high


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
    folder that the journal lies in, where there is one.
    """

    def __init__(self, path: Path, dir_fd: int | None = None) -> None:
        self.path = path
        self.offset = 0
        self.damage: list[Damage] = []
        self._size = 0
        self._suspected = -1
        self._torn: tuple[int, int] | None = None
        self._starts: deque[int] = deque(maxlen=64)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path if dir_fd is None else path.name, flags, dir_fd=dir_fd)

    @property
    def age_sec(self) -> float:
        """How long nothing has been written; infinite for a file that was removed."""
        info = os.fstat(self._fd)
        return time.time() - info.st_mtime if info.st_nlink else math.inf

    @property
    def unread(self) -> int:
        """How many bytes the last call of ``read`` left unread."""
        return max(0, self._size - self.offset)

    def read(self, limit: int = 1 << 18, *, ended: bool = False) -> list[Frame]:
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

    def close(self) -> None:
        os.close(self._fd)

    def _frames(self, limit: int) -> list[Frame]:
        """Read on from ``offset``, as far as there are whole frames."""
        if self.offset == 0 and not self._pass_magic():
            return []
        data = os.pread(self._fd, limit, self.offset)
        if len(data) >= _FRAME.size:
            length = _FRAME.unpack_from(data)[0]
            if length <= MAX_PAYLOAD and len(data) < _FRAME.size + length <= self.unread:
                data = os.pread(self._fd, _FRAME.size + length, self.offset)
        frames = list(_whole_frames(data, self.offset))
        if frames:
            self._starts.extend(frame.offset for frame in frames)
            self.offset = frames[-1].offset + _FRAME.size + len(frames[-1].payload)
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
        if len(begun) < _FRAME.size:
            return True
        length, checksum, kind = _FRAME.unpack_from(begun)
        there = self.unread - _FRAME.size
        if not (0 < kind <= _MAX_KIND and there < length <= MAX_PAYLOAD):
            return False
        if kind in (Kind.HEADER, Kind.STATUS, Kind.END):
            # JSON has no NUL, and what follows it has.
            text = os.pread(self._fd, _WINDOW_BYTES, self.offset + _FRAME.size)
            if b"\0" in text:
                return False
        # If all of the payload is there, its length is what was damaged.
        whole: bool = self._checksum_at(self.offset + _FRAME.size, there, kind) == checksum
        return not whole

    def _next_frame(self) -> int | None:
        """Where the next whole frame begins behind ``offset``; None if there is none.

        No text of a client can pass for one: it is in the journal as JSON, which has no NUL, and
        a kind has three of them.
        """
        left = _SEARCH_BYTES
        at = self.offset + 1
        while at + _FRAME.size <= self._size:
            window = os.pread(self._fd, _WINDOW_BYTES, at)
            for match in _KIND.finditer(window, _FRAME.size - 4):
                begin = match.start() - _FRAME.size + 4
                length, checksum, kind = _FRAME.unpack_from(window, begin)
                payload = at + begin + _FRAME.size
                if payload + length > self._size or not self._is_likely(kind, payload, length):
                    continue
                left -= length
                if left < 0:
                    return None
                if self._checksum_at(payload, length, kind) == checksum:
                    return at + begin
            if len(window) < _WINDOW_BYTES:
                break
            at += len(window) - _FRAME.size + 1
        return None

    def _is_likely(self, kind: int, payload: int, length: int) -> bool:
        """Whether these bytes begin as the payload of this kind does."""
        if kind == Kind.EVENTS:
            return is_head(os.pread(self._fd, min(length, EVENTS_HEAD.size), payload))
        return os.pread(self._fd, min(length, 1), payload) == b"{"

    def _checksum_at(self, begin: int, length: int, kind: int) -> int:
        checksum, end = _checksum(kind, b""), begin + length
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
        while self._starts:
            self.offset = self._starts.pop()
            if self.offset < self._size:
                data = os.pread(self._fd, self._size - self.offset, self.offset)
                frames = list(_whole_frames(data, self.offset))
                if sum(_FRAME.size + len(frame.payload) for frame in frames) == len(data):
                    self._starts.append(self.offset)
                    self.offset = self._size
                    return [frame for frame in frames if frame.kind in (Kind.STATUS, Kind.END)]
        self.damage.append(Damage(self._size, 0))
        self.offset = self._size
        return []


def _whole_frames(data: bytes, offset: int) -> Iterator[Frame]:
    """The whole frames that the data, which lies at this offset of the file, begins with."""
    position = 0
    while position + _FRAME.size <= len(data):
        length, checksum, kind = _FRAME.unpack_from(data, position)
        start = position + _FRAME.size
        if not 0 < kind <= _MAX_KIND or start + length > len(data):
            return
        payload = data[start : start + length]
        if _checksum(kind, payload) != checksum:
            return
        yield Frame(_KINDS.get(kind, kind), payload, offset + position)
        position = start + length
