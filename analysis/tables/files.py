# SPDX-License-Identifier: Apache-2.0
"""Open a file of a session."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def opened(path: Path) -> BufferedReader:
    """The file, opened for reading.

    Raises:
        OSError: it cannot be read, or is no plain file: a pipe or a device may never end.

    """
    # Opening a pipe that nobody writes to would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "it is a pipe or a device, and no plain file")
