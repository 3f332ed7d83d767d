# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says of a disk, or a user's part of one, that has no room."""


def write_atomically(
    path: Path, content: bytes, *, replace: bool = True, dir_fd: int | None = None
) -> None:
    """Write a file of mode 0600 that is there whole or not at all.

    With ``replace=False`` a file that is already there stays as it is. A relative path counts from
    the folder ``dir_fd``, where one is given.
    """
    with opened_atomically(path, replace=replace, dir_fd=dir_fd) as file:
        file.write(content)


@contextlib.contextmanager
def opened_atomically(
    path: Path, *, replace: bool = True, dir_fd: int | None = None
) -> Iterator[BinaryIO]:
    """The same for content that comes piece by piece: the file appears when the block ends, and
    not at all where it raises."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(3).hex()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(scratch, flags, 0o600, dir_fd=dir_fd)
    try:
        with open(fd, "wb") as file:
            yield file
        if replace:
            os.replace(scratch, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            _rename_unless_there(scratch, path, dir_fd)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(scratch, dir_fd=dir_fd)


def _rename_unless_there(scratch: Path, path: Path, dir_fd: int | None) -> None:
    try:
        os.link(scratch, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except FileExistsError:
        pass
    except OSError:
        # No hard links on this file system: the last of two founders that race here wins.
        try:
            os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            os.replace(scratch, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
