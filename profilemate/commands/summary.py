# SPDX-License-Identifier: Apache-2.0
"""``profilemate summary``: what a session's tables say, as text or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from profilemate.commands.reporting import one_line


def summary(
    session: Annotated[
        Path | None,
        typer.Argument(
            metavar="SESSION",
            help="A session's folder, or a folder of sessions, of which the newest is taken. "
            "Without it: the newest in $VLLM_PROFILING_DIR, or in vllm_profiling in the "
            "system's temporary folder.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Sum up a session.

    KV cache usage, block lifetimes, evictions, prefix-cache hit rates, preemptions.

    It works while vLLM still runs and after a crash, too, and says how far the data goes.

    \b
    Examples:
      profilemate summary             the newest session
      profilemate summary ~/runs      the newest session in this folder
      profilemate summary ~/runs/session_20260131_120000_4711_c0ffee
      profilemate summary --json | jq .prefix_cache.true.token_rate
    """
    with one_line():
        from analysis import open_session, summarize
        from analysis.renderers import json, text

        with _waiting("reading the session"):
            found = summarize(open_session(session))
        # A name that the terminal's encoding cannot show must not end it.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        if as_json:
            print(json.render(found))
        else:
            text.write(found, sys.stdout)


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """A sign of life on a terminal's stderr; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
