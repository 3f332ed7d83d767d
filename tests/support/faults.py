# SPDX-License-Identifier: Apache-2.0
"""Raise an error of choice at one line of profilemate's own code."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from profilemate import ROOT

Place = tuple[str, int]
"""A file of profilemate's, and a line of it that ran."""

Where = Callable[[FrameType], bool]


_NEVER_RAISE = ("try:", "return", "yield", "if opened is None:", "place, recorder = opened")
"""Lines where nothing can be raised, and Python or contextlib would let it past the handlers."""


class Lines:
    """Sees the lines that profilemate runs in the calls that ``where`` chooses.

    ``seen`` counts them by place. At the ``at``-th line of all of them, or at the first that is
    ``place``, it raises ``error``, once; ``raised`` says where that was.
    """

    def __init__(
        self,
        where: Where,
        error: Callable[[], BaseException] | None = None,
        *,
        at: int = 0,
        place: Place | None = None,
    ) -> None:
        self.seen: dict[Place, int] = {}
        self.raised: Place | None = None
        self._where = where
        self._error = error
        self._at = at
        self._place = place
        self._count = 0

    @property
    def count(self) -> int:
        """How many lines have run."""
        return self._count

    @contextmanager
    def watched(self, *, threads: bool = False) -> Iterator[Lines]:
        """Until the block ends: the lines of this thread, or those of threads that begin now."""
        if threads:
            before = threading.gettrace()
            threading.settrace(self._call)
            try:
                yield self
            finally:
                threading.settrace(before)  # type: ignore[arg-type]
        else:
            before = sys.gettrace()
            sys.settrace(self._call)
            try:
                yield self
            finally:
                sys.settrace(before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and "/profilemate/" in name and self._where(frame):
            return self._line
        return None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and linecache.getline(*place).strip() not in _NEVER_RAISE:
            self.seen[place] = self.seen.get(place, 0) + 1
            self._count += 1
            is_here = place == self._place or self._count == self._at
            if is_here and self._error is not None and self.raised is None:
                self.raised = place
                raise self._error()
        return self._line


@contextmanager
def tracebacks() -> Iterator[list[str]]:
    """What Python would have printed of errors that nobody caught, in threads and elsewhere."""
    found: list[str] = []
    hooks = threading.excepthook, sys.unraisablehook
    threading.excepthook = lambda args: found.append(f"{args.thread}: {args.exc_value!r}")
    sys.unraisablehook = lambda args: found.append(f"{args.object}: {args.exc_value!r}")
    try:
        yield found
    finally:
        threading.excepthook, sys.unraisablehook = hooks
