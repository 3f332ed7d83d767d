# SPDX-License-Identifier: Apache-2.0
"""The errors that callers of the analyzer need to know."""

from __future__ import annotations

from pathlib import Path

from profilemate.format.errors import SessionError

__all__ = ["RuleError", "SessionError", "unreadable"]


def unreadable(path: Path, error: OSError) -> SessionError:
    """What to say of a file or a folder that cannot be read."""
    remedy = "; run this as its owner, or have it made readable to you"
    is_refused = isinstance(error, PermissionError)
    return SessionError(
        f"cannot read {path}: {error.strerror or error}{remedy if is_refused else ''}"
    )


class RuleError(Exception):
    """A measure or a rule that makes no sense. The text is one line: what, and what to do."""
