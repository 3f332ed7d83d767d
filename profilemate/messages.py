# SPDX-License-Identifier: Apache-2.0
"""What profilemate tells the user: single lines on stderr, and never an error from saying them.

Nothing goes through logging, whose configuration belongs to vLLM and its users.
"""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

from profilemate import config

_said: dict[str, object] = {}


def say(line: str) -> None:
    """Write one line, in one call, so that lines of several processes do not mix."""
    text = f"profilemate: {' '.join(line.splitlines())}\n"
    try:
        stream = sys.stderr
        if type(stream) is TextIOWrapper:
            # Around its buffer: what cannot be written would stay there, and fail once more, with
            # an exit code, when Python ends.
            os.write(stream.fileno(), text.encode(stream.encoding, "backslashreplace"))
        else:
            stream.write(text)
            stream.flush()
    except Exception:
        # stderr may be None, closed, a pipe without a reader, or anything that was put there.
        pass


def say_once(key: str, line: str) -> None:
    """Write the line unless this process, or the one it was forked from, has used the key."""
    mine = object()
    # setdefault lets one of several threads win, without a lock that a fork could leave taken.
    if _said.setdefault(key, mine) is mine:
        say(line)


def say_if_verbose(line: str) -> None:
    """Write the line where VLLM_PROFILING_VERBOSE=1 asks for it."""
    if config.read(os.environ).verbose:
        say(line)


def give_up(reason: str) -> None:
    """Say why this process profiles nothing, and keep its children from trying and saying so."""
    config.leave_for_children(os.environ, config.EVERYTHING)
    say_once("off", f"off, {reason}; vLLM runs without it")
