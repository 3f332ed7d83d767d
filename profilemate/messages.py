# SPDX-License-Identifier: Apache-2.0
"""Messages to the user: single lines on stderr, which never raise an error.

Nothing goes through logging, whose configuration belongs to vLLM and its users.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from io import TextIOWrapper

from profilemate import config
from profilemate.config import shortened

LONGEST_LINE = 1_000
"""Characters of a line; longer ones hold something that is no message."""
LONGEST_CAUSE = 200

_said: dict[str, object] = {}

_NAMES_ONLY = (AttributeError, ImportError, NameError, RuntimeError, TypeError)
"""Errors whose texts name parts of the code. Those of others may quote what they were given, which
may be a client's."""


def say(line: str) -> None:
    """Write one line, in one call, so that lines of several processes do not mix."""
    try:
        line = shortened(" ".join(line.splitlines()), LONGEST_LINE)
        # Somebody else may have written a part of it, in the environment or in a folder's name.
        text = f"profilemate: {''.join(map(_printable, line))}\n"
        stream = sys.stderr
        if type(stream) is TextIOWrapper:
            # Not through its buffer: a line that cannot be written would stay there and fail again
            # when Python ends, with an exit code.
            os.write(stream.fileno(), text.encode(stream.encoding, "backslashreplace"))
        else:
            stream.write(text)
            stream.flush()
    except Exception:
        # stderr may be None, closed, a pipe without a reader, or anything that replaced it.
        pass


def _printable(char: str) -> str:
    return char if char.isprintable() else ascii(char)[1:-1]


def cause(error: BaseException) -> str:
    """What went wrong, in one line without anything that is not ours or vLLM's code."""
    kind = type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        return f"{kind}: {error.strerror}"
    if isinstance(error, _NAMES_ONLY):
        with contextlib.suppress(Exception):
            return shortened(f"{kind}: {' '.join(str(error).split())}", LONGEST_CAUSE)
    for frame, line in list(traceback.walk_tb(error.__traceback__))[-1:]:
        return f"{kind} at {os.path.basename(frame.f_code.co_filename)}:{line}"
    return kind


def say_once(key: str, line: str) -> None:
    """Write the line unless this process, or its parent before a fork, has used the key."""
    mine = object()
    # setdefault lets one of several threads win, without a lock that a fork could leave taken.
    if _said.setdefault(key, mine) is mine:
        say(line)


def say_if_verbose(line: str) -> None:
    """Write the line where VLLM_PROFILING_VERBOSE=1 asks for it."""
    if config.read(os.environ).verbose:
        say(line)


def give_up(reason: str) -> None:
    """Say why this process profiles nothing, and keep its children from trying and saying it."""
    config.leave_for_children(os.environ, config.EVERYTHING)
    say_once("off", f"off, {reason}; vLLM runs without it")
