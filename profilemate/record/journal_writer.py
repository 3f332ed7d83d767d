# SPDX-License-Identifier: Apache-2.0
"""Append to a journal, and to nothing else, whatever the disk and the application do."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections import deque
from pathlib import Path

ROOM_BYTES = 512
"""What a full disk must have room for: a frame that says so."""

HIGH_FD = 512
"""The lowest number of a journal's descriptor, where as many are allowed."""


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
        self._identity = identity(info)
        self._is_regular = stat.S_ISREG(info.st_mode)
        # Some file systems count no links.
        self._is_linked = info.st_nlink > 0
        self._under_way: tuple[int, int] | None = None
        self._last_frames: deque[tuple[int, int]] = deque(maxlen=16)

    def follow(self, before: JournalWriter) -> None:
        """Go on counting where the journal's file before this one ended."""
        self.events, self.given_up = before.events, before.given_up

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
            return identity(os.fstat(fd)) == self._identity
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


def open_beside(path: Path, name: str, folder: tuple[int, int]) -> int:
    """Make a file in the folder of ``path``, which must be this very ``folder``; its descriptor.

    A file of that name is replaced.

    Raises:
        OSError: it cannot be made.

    """
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if identity(os.fstat(parent)) != folder:
            raise OSError(errno.ENOENT, "another folder is in its place")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=parent)
    finally:
        os.close(parent)


def identity(info: os.stat_result) -> tuple[int, int]:
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
