# SPDX-License-Identifier: Apache-2.0
"""Text that somebody else wrote, such as a request's id, as people are shown it."""

from __future__ import annotations

LONGEST_NAME = 120
"""Characters of a name that a client chose, as far as it is shown."""


def printable(text: str) -> str:
    """The text without what could drive a terminal, whoever wrote it into the session."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shortened(text: str, width: int) -> str:
    """The text, or as much of it as fits beside three dots."""
    shown = printable(text)
    return shown if len(shown) <= width else f"{shown[: width - 3]}..."


def abridged(text: str | None) -> str:
    """The name, or its beginning and three dots: a client may choose one of 10,000 characters."""
    if text is None:
        return "n/a"
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 3]}..."
