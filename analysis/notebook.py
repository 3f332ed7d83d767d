# SPDX-License-Identifier: Apache-2.0
"""What a notebook shows of sessions and summaries, and the magic command ``%profilemate``.

IPython is told the names of the classes, so that nothing of the analyzer is imported before a cell
uses it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

USAGE = """\
%profilemate session [SESSION]           a session's folder, or the newest in a folder of sessions
%profilemate summary [SESSION]           what happened, and what was found
%profilemate compare BEFORE AFTER        what differs between two sessions
%profilemate chart NAME [SESSION]        a chart of the report; NAME such as hit_rate
"""


def load(shell: Any) -> None:
    """Add ``%profilemate``, and show sessions and summaries, in this IPython."""
    show_in(shell)
    shell.register_magic_function(magic, "line", "profilemate")


def show_where_it_runs() -> None:
    """Show sessions and summaries in the IPython that this code runs in, if it does."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get() if get is not None else None
    if shell is not None:
        show_in(shell)


def show_in(shell: Any) -> None:
    """Show sessions, summaries and comparisons as this IPython's HTML and text."""
    formatters = shell.display_formatter.formatters
    for (module, name), shown in _HTML.items():
        formatters["text/html"].for_type_by_name(module, name, shown)
    for (module, name), said in _TEXT.items():
        formatters["text/plain"].for_type_by_name(module, name, _printed(said))


def magic(line: str) -> Any:
    """A session, its summary, a comparison or a chart; the usage where nothing is asked for."""
    from IPython.core.error import UsageError

    from analysis.errors import RuleError, SessionError

    try:
        word, *rest = shlex.split(line) or [""]
    except ValueError as error:
        raise UsageError(f"%profilemate {line}: {error}") from None
    if not word:
        print(USAGE, end="")
        return None
    if word not in _WORDS:
        raise UsageError(f"%profilemate has no {word!r}; it has {', '.join(_WORDS)}")
    least, most, asked = _WORDS[word]
    if not least <= len(rest) <= most:
        raise UsageError(USAGE.splitlines()[list(_WORDS).index(word)])
    try:
        return asked(*rest)
    except (RuleError, SessionError) as error:
        raise UsageError(" ".join(str(error).split())) from None


def _session(path: str | None = None) -> Any:
    from analysis.tables.session import open_session

    return open_session(path)


def _summary(path: str | None = None) -> Any:
    from analysis.judgement.summarizing import summarize

    return summarize(_session(path))


def _compared(before: str, after: str) -> Any:
    from analysis.judgement.comparison import compare

    return compare(_session(before), _session(after))


def _chart(name: str, path: str | None = None) -> Any:
    from analysis import charts
    from analysis.errors import RuleError

    name = name.replace("-", "_")
    if name not in charts.QUESTIONS:
        raise RuleError(f"there is no chart {name!r}; there are {', '.join(charts.QUESTIONS)}")
    return charts.draw(_session(path), name)


_WORDS: Mapping[str, tuple[int, int, Callable[..., Any]]] = {
    "session": (0, 1, _session),
    "summary": (0, 1, _summary),
    "compare": (2, 2, _compared),
    "chart": (1, 2, _chart),
}
"""By word: how few and how many others may follow it, and what gives the object."""


def _summary_html(summary: Any) -> str:
    from analysis.renderers.html import cells

    return cells.of_summary(summary)


def _session_html(session: Any) -> str:
    from analysis.renderers.html import cells

    return cells.of_session(session)


def _summary_text(summary: Any) -> str:
    from analysis.renderers.text import screen

    return screen.render(summary)


def _session_text(session: Any) -> str:
    return f"{session.url or session.directory}: {session.state}, {session.end_sec:.6g} s"


def _comparison_text(comparison: Any) -> str:
    from analysis.renderers.text import compare

    return compare.render(comparison)


def _checked_text(checked: Any) -> str:
    from analysis.renderers.text import check

    return check.render(checked)


def _printed(said: Callable[[Any], str]) -> Callable[[Any, Any, bool], None]:
    """What IPython's printer calls for an object."""

    def printed(found: Any, printer: Any, _cycle: bool) -> None:
        printer.text(said(found).rstrip("\n"))

    return printed


_SESSION = ("analysis.tables.session", "Session")
_SUMMARY = ("analysis.summary", "Summary")

_HTML: Mapping[tuple[str, str], Callable[[Any], str]] = {
    _SESSION: _session_html,
    _SUMMARY: _summary_html,
}
_TEXT: Mapping[tuple[str, str], Callable[[Any], str]] = {
    _SESSION: _session_text,
    _SUMMARY: _summary_text,
    ("analysis.judgement.comparison", "Comparison"): _comparison_text,
    ("analysis.judgement.check", "Checked"): _checked_text,
}
