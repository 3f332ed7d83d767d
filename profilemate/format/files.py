# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes, *, replace: bool = True) -> None:
    """Write a file of mode 0600 that is there whole or not at all.

    With ``replace=False`` a file that is already there stays as it is.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(3).hex()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(scratch, flags, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(content)
        if replace:
            os.replace(scratch, path)
        else:
            _rename_unless_there(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _rename_unless_there(scratch: Path, path: Path) -> None:
    try:
        os.link(scratch, path)
    except FileExistsError:
        pass
    except OSError:
        # No hard links on this file system: the last of two founders that race here wins.
        if not path.exists():
            os.replace(scratch, path)
