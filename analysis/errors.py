# SPDX-License-Identifier: Apache-2.0
"""The errors that callers of the analyzer need to know."""

from __future__ import annotations


class SessionError(Exception):
    """A session cannot be found or read. The text is one line: what, where, what to do."""


class RuleError(Exception):
    """A measure or a rule that makes no sense. The text is one line: what, and what to do."""
