# SPDX-License-Identifier: Apache-2.0
"""``profilemate reconcile``: vLLM's own metrics beside the session, each difference explained."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.errors import RuleError
from profilemate.commands import reconcile_page
from profilemate.commands.shared.options import AsJson, SessionArgument
from profilemate.commands.shared.progress import status
from profilemate.commands.shared.stdout import show

if TYPE_CHECKING:
    from analysis.engine_metrics import Page, Reconciliation

SETTLE_SEC = 2.0
"""What a running engine has done is in the tables after this time."""


@dataclass(frozen=True)
class ReconcileOptions:
    session: SessionArgument = None
    metrics_url: Annotated[
        str | None,
        typer.Option(
            "--metrics-url",
            metavar="URL",
            help="The server's metrics, such as http://localhost:8000/metrics.",
            show_default=False,
        ),
    ] = None
    metrics_file: Annotated[
        Path | None,
        typer.Option(
            "--metrics-file",
            metavar="FILE",
            help="Saved metrics: curl -s URL > FILE. They count as of the time when the file "
            "last changed.",
            show_default=False,
        ),
    ] = None
    as_json: AsJson = False


def reconcile(options: ReconcileOptions) -> int:
    """Compare vLLM's own metrics with a session.

    Compares prefix cache queries and hits, tokens, requests, preemptions and usage; with vLLM's
    --kv-cache-metrics the lifetimes of blocks, too. Where the two differ, it says by how much and
    why, and what it cannot explain.

    \b
    Examples:
      profilemate reconcile --metrics-url http://localhost:8000/metrics
      profilemate reconcile ~/runs --metrics-file metrics.txt
      profilemate reconcile ~/runs --metrics-file metrics.txt --json | jq .agrees

    \b
    Exit codes:
      0   they agree, or each difference is explained
      1   a difference is not explained
      2   nothing was compared: no such session, no such metrics, or a wrong
          option
    """
    from analysis.renderers.text import engine_metrics as text

    found = _reconciled(options)
    show(found, text.write, as_json=options.as_json)
    return 0 if found.agrees else 1


def _reconciled(options: ReconcileOptions) -> Reconciliation:
    from analysis import engine_metrics, open_session

    page = _page(options)
    with status("reading the session"):
        session = open_session(options.session)
        if session.state == "running" and options.metrics_url is not None:
            time.sleep(SETTLE_SEC)
            session = open_session(options.session if session.url else session.directory)
        return engine_metrics.reconcile(session, page)


def _page(options: ReconcileOptions) -> Page:
    from analysis import engine_metrics

    url, file = options.metrics_url, options.metrics_file
    if url is not None and file is None:
        with status("asking the server"):
            return engine_metrics.parse(*reconcile_page.scraped(url))
    if file is not None and url is None:
        return engine_metrics.parse(*reconcile_page.saved(file))
    raise RuleError("give either --metrics-url URL or --metrics-file FILE")
