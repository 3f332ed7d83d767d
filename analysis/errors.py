# SPDX-License-Identifier: Apache-2.0
"""The errors that callers of the analyzer need to know."""

from __future__ import annotations

from profilemate.format.errors import SessionError, unreadable

__all__ = ["RuleError", "SessionError", "unreadable"]


class RuleError(Exception):
    """A measure or a rule that makes no sense. The text is one line: what, and what to do."""
