# SPDX-License-Identifier: Apache-2.0
"""The one error of a session, for those who write one and for those who read it."""

from __future__ import annotations

import errno
from pathlib import Path

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""What reading never says."""


class SessionError(Exception):
    """A session cannot be found, read or written. The text is one line: what, where, what to do."""


def unreadable(path: Path, error: OSError) -> SessionError:
    """What to say of a file or a folder that cannot be read, or written where there is no room."""
    remedy = "; run this as its owner, or have it made readable to you"
    is_refused = isinstance(error, PermissionError)
    return SessionError(
        f"cannot {'write' if error.errno in _NO_ROOM else 'read'} {path}: {error.strerror or error}"
        f"{remedy if is_refused else ''}"
    )
