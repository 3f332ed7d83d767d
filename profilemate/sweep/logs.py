# SPDX-License-Identifier: Apache-2.0
"""Which line of a log says why a command failed?"""

from __future__ import annotations

import re
from pathlib import Path

READ_BYTES = 4 << 20
"""How much of a log's end is read."""

_LONGEST = 300
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PROCESS = re.compile(r"^\((?:\w+ )+pid=\d+\)\s*")
_STAMP = re.compile(r"^(?:ERROR|WARNING|INFO|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s*")
_ERROR = re.compile(
    r"^(?:[\w.]+\.)?\w*(?:Error|Exception|OutOfMemory|Refused|Killed)\b.*:"  # Python's
    r"|^(?:[\w./-]+: )?(?:error|fatal|fatal error)\b[:,]"  # argparse's, the shell's
    r"|command not found$|: not found$|No such file or directory$",
    re.IGNORECASE,
)
_ELSEWHERE = re.compile(r"see root cause above|See stack trace above", re.IGNORECASE)
"""vLLM's parent process says this when an engine does not start. The engine's own reason is further
up."""


def tail(path: Path) -> str:
    """The end of the log, without colours; a carriage return begins a new line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - READ_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return _COLOUR.sub("", text).replace("\r", "\n")


def telling_line(text: str) -> str | None:
    """The last line that names an error, or else the last line; None for an empty log.

    >>> telling_line("ValueError: too large\\nRuntimeError: failed. See root cause above.\\nbye")
    'ValueError: too large'
    """
    lines = [_bare(line) for line in text.splitlines()]
    said = [line for line in lines if line]
    errors = [line for line in said if _ERROR.search(line)]
    causes = [line for line in errors if not _ELSEWHERE.search(line)]
    found = next(iter((causes or errors or said)[-1:]), None)
    if found is None or len(found) <= _LONGEST:
        return found
    return f"{found[: _LONGEST - 3]}..."


def _bare(line: str) -> str:
    """The line without the process, the time and the place that vLLM writes before it."""
    return _STAMP.sub("", _PROCESS.sub("", line.strip())).strip()
