# SPDX-License-Identifier: Apache-2.0
"""Show what is wrong as one line on stderr, and end with exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from analysis.errors import RuleError, SessionError
from profilemate.collector import CollectorError
from profilemate.messages import say


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Turn an error in a session, a rule or an option into one line and exit code 2."""
    try:
        yield
    except (RuleError, SessionError, CollectorError) as error:
        say(" ".join(str(error).split()))
        raise typer.Exit(2) from None
