# SPDX-License-Identifier: Apache-2.0
"""The one error of a session, for those who write one and for those who read it."""

from __future__ import annotations


class SessionError(Exception):
    """A session cannot be found, read or written. The text is one line: what, where, what to do."""
