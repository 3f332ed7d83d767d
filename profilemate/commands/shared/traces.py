# SPDX-License-Identifier: Apache-2.0
"""Read what the options for a trace say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.errors import RuleError

if TYPE_CHECKING:
    from analysis.whatif.trace import TimeUnit


def tokens_per_id(given: int | None) -> int | None:
    """Tokens that an id stands for.

    Raises:
        RuleError: the number makes no sense.

    """
    from analysis.whatif.trace_tokens import MOST

    if given is not None and not 1 <= given <= MOST:
        raise RuleError(f"--tokens-per-id is {given}; give a number from 1 to {MOST:,}")
    return given


def time_unit(given: str | None) -> TimeUnit | None:
    """The unit of a trace's times.

    Raises:
        RuleError: it is no unit.

    """
    from analysis.whatif.trace import TIME_UNITS

    if given is None:
        return None
    found = next((unit for unit in TIME_UNITS if unit == given), None)
    if found is None:
        raise RuleError(f"--time-unit: {given!r} is none of {', '.join(TIME_UNITS)}")
    return found


def for_sessions_no_option(**given: object) -> None:
    """Refuse the options for a trace where the source is a session.

    Raises:
        RuleError: one was given.

    """
    for name, value in given.items():
        if value is not None:
            option = "--" + name.replace("_", "-")
            raise RuleError(f"{option}: a session says it itself; the option is for traces")
