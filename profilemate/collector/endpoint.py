# SPDX-License-Identifier: Apache-2.0
"""Offer the totals to Prometheus, where VLLM_PROFILING_METRICS asks for it.

Whatever goes wrong with it is one line in collector.log and ``metrics`` in metadata.json, and the
session is recorded all the same.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from profilemate.collector.log import complain
from profilemate.config import Address, shown_address
from profilemate.format.totals import RunTotals

if TYPE_CHECKING:
    from profilemate.metrics.server import Server

RETRY_SEC = 5.0
"""How often an address is tried that could not be used: mostly another session's collector has it,
which may end."""


class Endpoint:
    """Serves at ``address``; nowhere where that is None."""

    def __init__(self, address: Address | None) -> None:
        self._address = address
        self._server: Server | None = None
        self._problem: str | None = None
        self._next = 0.0
        self._is_given_up = address is None

    def show(self, found: RunTotals) -> None:
        """Hand these figures out from now on."""
        if self._server is not None:
            self._server.show(found)
        elif not self._is_given_up and time.monotonic() >= self._next:
            self._next = time.monotonic() + RETRY_SEC
            self._start(found)

    def state(self) -> dict[str, Any] | None:
        """As in metadata.json; None where nothing was asked for."""
        if self._address is None:
            return None
        return {"address": shown_address(self._address), "problem": self._problem}

    def _start(self, found: RunTotals) -> None:
        assert self._address is not None
        try:
            from profilemate.metrics.server import Server

            self._server = Server(self._address, found)
        except ImportError as error:
            self._is_given_up = True
            self._say(f"prometheus-client cannot be imported for {sys.executable} ({error})")
        except OSError as error:
            self._say(f"{shown_address(self._address)} cannot be used ({error.strerror})")
        else:
            self._problem = None

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            complain(f"no metrics: {problem}; the session is recorded")
        self._problem = problem
