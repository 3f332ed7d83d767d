# SPDX-License-Identifier: Apache-2.0
"""Answers from the tables of a profilemate session. ``docs/library.md`` shows how to ask.

>>> import analysis
>>> session = analysis.open_session()  # the newest one  # doctest: +SKIP
>>> analysis.summarize(session).prefix_cache.true.token_rate  # doctest: +SKIP
0.861328125
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from analysis.notebook import show_where_it_runs

if TYPE_CHECKING:
    from analysis import charts
    from analysis.errors import RuleError, SessionError
    from analysis.judgement import measures
    from analysis.judgement.check import Checked, check
    from analysis.judgement.comparison import Comparison, compare
    from analysis.judgement.summarizing import summarize
    from analysis.summary import Summary
    from analysis.tables.session import Session, open_session

__all__ = [
    "Checked",
    "Comparison",
    "RuleError",
    "Session",
    "SessionError",
    "Summary",
    "charts",
    "check",
    "compare",
    "measures",
    "open_session",
    "summarize",
]

_HOMES = {
    "Checked": "analysis.judgement.check",
    "Comparison": "analysis.judgement.comparison",
    "RuleError": "analysis.errors",
    "Session": "analysis.tables.session",
    "SessionError": "analysis.errors",
    "Summary": "analysis.summary",
    "check": "analysis.judgement.check",
    "compare": "analysis.judgement.comparison",
    "open_session": "analysis.tables.session",
    "summarize": "analysis.judgement.summarizing",
}

_MODULES = {"charts": "analysis.charts", "measures": "analysis.judgement.measures"}

show_where_it_runs()


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import on first use: ``python -m analysis`` must be able to say that Polars is missing."""
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
