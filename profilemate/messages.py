# SPDX-License-Identifier: Apache-2.0
"""Messages to the user: single lines on stderr, which never raise an error.

Nothing goes through logging, whose configuration belongs to vLLM and its users.
"""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

from profilemate import config

MAX_REASON = 300
"""Characters of an error's text that are shown."""

_said: dict[str, object] = {}


def say(line: str) -> None:
    """Write one line, in one call, so that lines of several processes do not mix."""
    try:
        text = f"profilemate: {_visible(' '.join(line.splitlines()))}\n"
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


def reason_of(error: BaseException) -> str:
    """What was raised, as a message or the metadata say it. It may hold a client's text."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return name
    return f"{name}: {text if len(text) <= MAX_REASON else text[:MAX_REASON] + '…'}"


def _visible(text: str) -> str:
    """The text without what a terminal acts on."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


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
