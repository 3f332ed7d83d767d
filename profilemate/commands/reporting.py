# SPDX-License-Identifier: Apache-2.0
"""How a verb says that it cannot: one line on stderr and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from analysis.errors import RuleError, SessionError


@contextmanager
def one_line() -> Iterator[None]:
    """Turn what is wrong with a session or a rule into one line and the exit code 2."""
    try:
        yield
    except (RuleError, SessionError) as error:
        print("profilemate:", " ".join(str(error).split()), file=sys.stderr)
        raise typer.Exit(2) from None
