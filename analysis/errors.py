# SPDX-License-Identifier: Apache-2.0
"""The one error that callers of the analyzer need to know."""

from __future__ import annotations


class SessionError(Exception):
    """A session cannot be found or read. The text is one line: what, where, what to do."""
