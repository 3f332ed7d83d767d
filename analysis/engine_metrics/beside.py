# SPDX-License-Identifier: Apache-2.0
"""Do vLLM's figures agree with the session's, and what explains their differences?

An explanation is something that only vLLM counts, or only the session. Its amount is what it adds
to the session's figure. The tables give the amount exactly, or as a range. What is left of a
difference is unexplained. The explanations are

* what came after the page was taken, and what was under way then. vLLM counts a step when its
  results arrive, so the amount of its last steps is a range;
* lookups that vLLM counts more than once (``analysis.prefix.prefix_cache`` has the rules of its
  releases);
* requests that vLLM counts only once they have a token, and requests that the API server ends;
* of a session whose oldest segments were removed: what came before;
* for the histograms of blocks: the sample, and blocks without content that vLLM allocated again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from analysis.engine_metrics import blocks, prefix_cache, requests
from analysis.engine_metrics.figures import Row, within
from analysis.engine_metrics.moment import Seen, moment
from analysis.engine_metrics.page import Page
from analysis.tables.facts import Facts
from analysis.tables.facts import read as read_facts
from analysis.tables.metadata import wall_clock
from analysis.tables.session import Session


@dataclass(frozen=True)
class Reconciliation:
    """A page of vLLM's metrics beside a session.

    ``scraped_sec``: when the page was taken, in seconds since the session began; None where that
    was after the session's end, or is not known. ``session_end_sec``: when the session ended, in
    such seconds. ``doubts``: why the two may not compare, in sentences. ``missing``:
    metrics that the page lacks. ``agrees``: no row is unexplained.
    """

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
    # vLLM's counters begin when it starts.
    session = session.after(0)
    facts = read_facts(session)
    at = moment(session, page)
    seen = Seen(session, at)
    missing = _missing(session)
    period = session.period
    # A period that has ended: of a page that was not taken in it, the moment is not known.
    is_elsewhen = at is None and period is not None and period.end_sec is not None
    rows = tuple(
        _with_more(row, missing, is_elsewhen=is_elsewhen) if missing else row
        for kind in (prefix_cache, requests, blocks)
        for row in kind.rows(page, seen, facts)
    )
    found = [row.metric for row in rows]
    return Reconciliation(
        session_id=str(session.metadata.get("session_id") or session.directory.name),
        source=page.source,
        scraped_sec=at,
        session_end_sec=session.end_sec,
        doubts=tuple(_doubts(session, page, facts)),
        rows=rows,
        missing=tuple(
            name for name in _EXPECTED if not any(metric.startswith(name) for metric in found)
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


_MOMENTARY = ("vllm:kv_cache_usage_perc",)
"""What these say is of one moment, so nothing that came before adds to it."""


def _missing(session: Session) -> str | None:
    """What vLLM has counted and the session lacks, in words; None where that is nothing."""
    if session.period is not None:
        return "what came before or after the session's period, or in a pause of its recording"
    if session.window is not None:
        return "what came before the session's window, which was removed"
    return None


def _with_more(row: Row, missing: str, *, is_elsewhen: bool) -> Row:
    """The row beside a part of a run: vLLM's counters have what is missing, too. What is of one
    moment has nothing more, unless that ``is_elsewhen``, outside of the session's part."""
    is_momentary = row.metric.startswith(_MOMENTARY)
    if row.verdict != "unexplained" or (is_momentary and not is_elsewhen):
        return row
    is_any = is_momentary or row.metric.startswith("vllm:kv_block_")
    least = -math.inf if is_any else 0.0
    if (row.difference or 0.0) < least:
        return row
    more = within(missing, least, math.inf)
    return replace(row, parts=(*row.parts, more), unexplained=0.0, verdict="explained")


def _doubts(session: Session, page: Page, facts: Facts) -> Iterator[str]:
    """Why the page may be another session's, or say more than is left of it."""
    if session.period is not None:
        yield (
            "vLLM counts on while the recording is paused, and the session has only what came from "
            f"{session.begin_sec:.6g} to {session.end_sec:.6g} s: what a counter has more may be "
            "of another time."
        )
    elif session.window is not None:
        yield (
            "vLLM counts from its start, and the session has only what came after "
            f"{session.window.begin_sec:.6g} s: what a counter has more may be of before."
        )
    began = wall_clock(session.metadata.get("started_at"))
    if began is not None and page.scraped_at is not None and page.scraped_at < began:
        yield "The page was taken before the session began."
    started = page.total("process_start_time_seconds")
    ended = wall_clock(session.metadata.get("ended_at"))
    if started is not None and ended is not None and started > ended:
        yield "The server that gave the page started after the session had ended."
    blocks = page.label("vllm:cache_config_info", "num_gpu_blocks")
    if blocks and blocks.isdigit() and facts.pool_blocks not in (None, int(blocks)):
        yield (
            f"The page is of an engine with {int(blocks):,} blocks, and the session of one with "
            f"{facts.pool_blocks:,}."
        )
