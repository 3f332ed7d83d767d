# SPDX-License-Identifier: Apache-2.0
"""``profilemate reconcile``: vLLM's own metrics beside the session, each difference explained."""

from __future__ import annotations

import http.client
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated

import typer

from analysis.errors import RuleError, SessionError
from profilemate.commands.options import AsJson, SessionArgument
from profilemate.commands.reporting import one_line
from profilemate.commands.waiting import waiting

ANSWER_SEC = 30
SETTLE_SEC = 2.0
"""Rows of what a running engine has done are in the tables within so long."""
LARGEST_BYTES = 64 << 20
PIECE_BYTES = 1 << 20


def reconcile(
    session: SessionArgument = None,
    metrics_url: Annotated[
        str | None,
        typer.Option(
            "--metrics-url",
            metavar="URL",
            help="The server's metrics, such as http://localhost:8000/metrics.",
            show_default=False,
        ),
    ] = None,
    metrics_file: Annotated[
        Path | None,
        typer.Option(
            "--metrics-file",
            metavar="FILE",
            help="The metrics as they were saved: curl -s URL > FILE. Its time of change is taken "
            "for when that was.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Hold vLLM's own metrics against a session.

    Prefix-cache queries and hits, tokens, requests, preemptions, usage, and with
    --kv-cache-metrics the lifetimes of blocks. Where the two differ it says by how much and why,
    and what is left unexplained.

    \b
    Examples:
      profilemate reconcile --metrics-url http://localhost:8000/metrics
      profilemate reconcile ~/runs --metrics-file metrics.txt
      profilemate reconcile ~/runs --metrics-file metrics.txt --json | jq .agrees

    \b
    Exit codes:
      0   they agree, or each difference is explained
      1   a difference is not explained
      2   it could not be checked: no such session, no such page, a wrong option
    """
    with one_line():
        from analysis import engine_metrics, open_session
        from analysis.renderers import json
        from analysis.renderers.text import engine_metrics as text

        if (metrics_url is None) == (metrics_file is None):
            raise RuleError("give either --metrics-url URL or --metrics-file FILE")
        if metrics_file is not None:
            page = engine_metrics.parse(*_saved(metrics_file))
        else:
            with waiting("asking the server"):
                page = engine_metrics.parse(*_scraped(metrics_url or ""))
        with waiting("reading the session"):
            opened = open_session(session)
            if opened.state == "running" and metrics_url is not None:
                time.sleep(SETTLE_SEC)
                opened = open_session(opened.directory)
            found = engine_metrics.reconcile(opened, page)
        # A name that the terminal's encoding cannot show must not end it.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        if as_json:
            print(json.render(found))
        else:
            text.write(found, sys.stdout)
    if not found.agrees:
        raise typer.Exit(1)


def _saved(path: Path) -> tuple[str, str, float]:
    # A pipe or a device may never end.
    if path.exists() and not path.is_file():
        raise SessionError(f"{path} is no regular file; save the page in one")
    try:
        return path.read_text("utf-8"), str(path), path.stat().st_mtime
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise SessionError(f"cannot read {path}: {why}") from None


def _scraped(url: str) -> tuple[str, str, float]:
    if not url.startswith(("http://", "https://")):
        raise RuleError(f"{url!r} is no URL; write http://localhost:8000/metrics")
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SEC) as answer:
            content = _whole(answer)
    except urllib.error.HTTPError as error:
        raise SessionError(
            f"cannot get {url}: it answers {error.code} {error.reason}; give the URL of its metrics"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise SessionError(f"cannot get {url}: {why}; is the server running?") from None
    return content.decode("utf-8", "replace"), url, time.time()


def _whole(answer: http.client.HTTPResponse) -> bytes:
    """All of the answer; a part of a page would read as a page with other figures."""
    content = bytearray()
    deadline = time.monotonic() + ANSWER_SEC
    while piece := answer.read1(PIECE_BYTES):
        content += piece
        if len(content) > LARGEST_BYTES:
            raise ValueError(f"it has more than {LARGEST_BYTES >> 20} MiB")
        if time.monotonic() > deadline:
            raise TimeoutError(f"it takes longer than {ANSWER_SEC} s")
    if answer.length:
        raise http.client.IncompleteRead(bytes(content), answer.length)
    return bytes(content)
