# SPDX-License-Identifier: Apache-2.0
"""Open a file of a session."""

from __future__ import annotations

import errno
import os
import stat
import weakref
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any


def opened(path: Path, *, follow: bool = True) -> BufferedReader:
    """The file, opened for reading.

    Args:
        path: the file.
        follow: it may be a symbolic link.

    Raises:
        OSError: it cannot be read, or is no plain file: a pipe or a device may never end.

    """
    return os.fdopen(_descriptor(path, follow=follow), "rb")


class Held:
    """A file that stays open, so that it can be read after it was renamed or removed.

    It is closed when nobody knows the object any more.
    """

    def __init__(self, path: Path, *, follow: bool = True) -> None:
        """Raises OSError as ``opened`` does."""
        self._fd = _descriptor(path, follow=follow)
        weakref.finalize(self, os.close, self._fd)

    def fileno(self) -> int:
        return self._fd

    def reader(self) -> BufferedReader:
        """The file from its beginning. Each reader has a place in it of its own."""
        return BufferedReader(_Reader(self, self._fd))


class _Reader(RawIOBase):
    def __init__(self, held: Held, fd: int) -> None:
        self._held = held  # As long as somebody reads, the file stays open.
        self._fd = fd
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at}
        self._at = offset + begin.get(whence, os.fstat(self._fd).st_size)
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self._fd, [buffer], self._at)
        self._at += count
        return count


def _descriptor(path: Path, *, follow: bool) -> int:
    # Opening a pipe that nobody writes to would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(path, flags)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "it is a pipe or a device, and no plain file")
