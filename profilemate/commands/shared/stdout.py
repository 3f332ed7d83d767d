# SPDX-License-Identifier: Apache-2.0
"""Print what a command found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO, TypeVar

if TYPE_CHECKING:
    from analysis.renderers.json import Found

F = TypeVar("F", bound="Found")


def show(found: F, write_text: Callable[[F, TextIO], None], *, as_json: bool) -> None:
    """Print what was found, as JSON or as text."""
    _take_every_name()
    if as_json:
        # It knows what each command finds, and imports all of that.
        from analysis.renderers import json

        print(json.render(found))
    else:
        write_text(found, sys.stdout)


def show_line(text: str) -> None:
    """Print a line that may name a file."""
    _take_every_name()
    print(text)


def _take_every_name() -> None:
    """Show a name that the terminal's encoding lacks in escapes, and do not end because of it."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
