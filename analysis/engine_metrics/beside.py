# SPDX-License-Identifier: Apache-2.0
"""How does each of vLLM's figures differ from the session's, and why?

A part of the difference is something that only one of the two counts. Its amount is what it adds to
the session's figure. The tables give it exactly, or as a range. What is left of the difference is
unexplained. The parts are

* events after the page was taken, and steps that were under way then: vLLM counts a step when its
  results arrive, so the last steps are a range;
* lookups that vLLM counts more than once (``analysis.prefix.prefix_cache`` has the rules of its
  releases);
* prompts, which vLLM counts only once the request has a token, and requests that the API server
  ends itself;
* for the histograms of blocks: the sample, and blocks without content that were allocated again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from analysis.engine_metrics import blocks, prefix_cache, requests
from analysis.engine_metrics.figures import Row
from analysis.engine_metrics.moment import Seen, moment
from analysis.engine_metrics.page import Page
from analysis.tables.facts import Facts
from analysis.tables.facts import read as read_facts
from analysis.tables.metadata import wall_clock
from analysis.tables.session import Session


@dataclass(frozen=True)
class Reconciliation:
    """``scraped_sec``: when the page was taken, in seconds since the session began; None where that
    was after the session's end, or is not known. ``session_end_sec``: how far the session goes.
    ``doubts``: sentences that say why the page may be of another session. ``missing``: metrics that
    the page lacks. ``agrees``: no row is unexplained."""

    session_id: str
    source: str
    scraped_sec: float | None
    session_end_sec: float
    doubts: tuple[str, ...]
    rows: tuple[Row, ...]
    missing: tuple[str, ...]
    agrees: bool


def reconcile(session: Session, page: Page) -> Reconciliation:
    """Compare a page of vLLM's metrics with the session.

    Raises:
        SessionError: a table cannot be read.

    """
    # vLLM counts from its start on, so there is no warm-up.
    session = replace(session, begin_sec=0.0)
    facts = read_facts(session)
    at = moment(session, page)
    seen = Seen(session, at)
    rows = tuple(
        row for kind in (prefix_cache, requests, blocks) for row in kind.rows(page, seen, facts)
    )
    known = [row.metric for row in rows]
    return Reconciliation(
        session_id=str(session.metadata.get("session_id") or session.directory.name),
        source=page.source,
        scraped_sec=at,
        session_end_sec=session.end_sec,
        doubts=tuple(_doubts(session, page, facts)),
        rows=rows,
        missing=tuple(
            name for name in _EXPECTED if not any(metric.startswith(name) for metric in known)
        ),
        agrees=not any(row.verdict == "unexplained" for row in rows),
    )


_EXPECTED = (
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:num_preemptions",
    "vllm:kv_cache_usage_perc",
    "vllm:kv_block_lifetime_seconds",
)


def _doubts(session: Session, page: Page, facts: Facts) -> Iterator[str]:
    began = wall_clock(session.metadata.get("started_at"))
    if began is not None and page.scraped_at is not None and page.scraped_at < began:
        yield "The page was taken before the session began."
    started = page.total("process_start_time_seconds")
    ended = wall_clock(session.metadata.get("ended_at"))
    if started is not None and ended is not None and started > ended:
        yield "The server that gave the page was started after the session had ended."
    blocks = page.label("vllm:cache_config_info", "num_gpu_blocks")
    if blocks and blocks.isdigit() and facts.pool_blocks not in (None, int(blocks)):
        yield (
            f"The page is of an engine with {int(blocks):,} blocks, and the session of one with "
            f"{facts.pool_blocks:,}."
        )
