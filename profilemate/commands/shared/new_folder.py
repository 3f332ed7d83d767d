# SPDX-License-Identifier: Apache-2.0
"""Make a folder that is there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from analysis.errors import SessionError


@contextmanager
def made(place: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when it is full, and goes if it cannot be filled.

    Raises:
        SessionError: something of that name is there, or the folder cannot be written.

    """
    scratch = place.with_name(f".{place.name}.{os.getpid()}.{os.urandom(3).hex()}")
    if os.path.lexists(place):
        raise SessionError(f"{place} is there already; name another folder with -o")
    try:
        os.mkdir(scratch, 0o700)
    except OSError as error:
        raise SessionError(f"cannot write {place}: {error.strerror}") from None
    try:
        yield scratch
        os.rename(scratch, place)
    except OSError as error:
        raise SessionError(f"cannot write {place}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
