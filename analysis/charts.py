# SPDX-License-Identifier: Apache-2.0
"""The report's charts, one call each, as figures of Plotly's: ``charts.hit_rate(session)``.

``QUESTIONS`` has them all, and what each answers. A figure shows itself in a notebook, and can be
changed and saved as any of Plotly's. The first chart of a session reads all tables for all charts,
which takes as long as a report; the others of that session are drawn at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from analysis.renderers.html.chart import Chart
    from analysis.tables.session import Session

QUESTIONS: Mapping[str, str] = {
    "blocks": "What were the blocks doing?",
    "load": "Did requests wait because the pool was full?",
    "slots": "How many slots of the cache held a token?",
    "block_map": "Which blocks were in use, and which kept content for reuse?",
    "holders": "Who held blocks at the end?",
    "fragmentation": "How much of the held blocks is empty?",
    "head_room": "How many requests at once is there room for?",
    "hit_rate": "How much of the prompts came from the cache?",
    "sharing": "How deep do prompts share their beginnings?",
    "misses": "Why was the rest of the prompts not found?",
    "miss_ratio_curve": "Would a larger pool find more?",
    "pieces": "Which shared beginnings saved the most?",
    "age_at_hit": "Is the cache large enough for what comes back?",
    "working_set": "How much cache would hold everything that was used lately?",
    "working_set_curve": "How does the working set grow with the time that is looked back?",
    "families": "Where do prompts that begin alike part?",
    "eviction_rate": "When were cached blocks evicted?",
    "ages": "How old were evicted blocks, and for how long had nobody used them?",
    "regret": "Which evictions were a loss?",
    "evictors": "Which requests evicted what others needed?",
    "timeline": "What did requests spend their time on?",
    "waiting": "What did waiting requests wait for?",
    "pressure": "Does a full pool make requests slower?",
    "by_salt": "Which cache salt found what in the cache?",
    "by_lora": "Which adapter found what in the cache?",
    "by_priority": "Which priority found what in the cache?",
    "by_api_server": "Which API server found what in the cache?",
    "by_engine": "Which engine found what in the cache?",
    "by_label": "Which label found what in the cache?",
    "preemptions": "What did preemptions cost?",
    "rent": "Which requests took the most of the cache?",
    "steps": "How large were the scheduler's steps?",
    "step_phases": "What did steps compute, prompts or answers?",
    "gpu_time": "How long did a step take on the GPU?",
    "executions": "How much ran in CUDA graphs?",
    "eager": "Why did the rest run eagerly?",
    "batch_sizes": "Which sizes do batches have, and which graphs are there for them?",
    "ledger": "What did each graph cost, and what did it give?",
    "start_up": "Where did the memory go at start-up?",
    "graph_memory": "Did vLLM reserve the right amount for CUDA graphs?",
    "used_memory": "How full and how busy were the GPUs?",
    "experts": "Which experts are used?",
    "expert_pairs": "Which experts come together more often than by chance?",
}
"""By name: what the chart answers, as the report asks it."""

_KEPT = 4
_read: deque[tuple[ref[Session], dict[str, Chart]]] = deque(maxlen=_KEPT)
"""The charts of the sessions that were drawn last. A session that nobody has any more may go, and
with it a copy of its tables."""


def __dir__() -> list[str]:
    return ["QUESTIONS", "draw", *QUESTIONS]


def __getattr__(name: str) -> Callable[..., Figure]:
    if name not in QUESTIONS:
        raise AttributeError(f"there is no chart {name!r}; charts.QUESTIONS has all")

    def drawn(session: Session, *, dark: bool = False) -> Figure:
        return draw(session, name, dark=dark)

    drawn.__name__ = drawn.__qualname__ = name
    drawn.__doc__ = f"{QUESTIONS[name]} Raises SessionError where a table cannot be read."
    return drawn


def draw(session: Session, name: str, *, dark: bool = False) -> Figure:
    """A chart of a session. Where the session has nothing of it, the figure says so.

    Args:
        session: the session.
        name: of ``QUESTIONS``.
        dark: in the colours of the report's dark theme.

    Raises:
        KeyError: there is no such chart.
        SessionError: a table cannot be read.

    """
    from analysis.renderers.html import drawn
    from analysis.renderers.html.chart import Chart

    question = QUESTIONS[name]
    key = name.replace("_", "-")
    found = _charts(session).get(key)
    nothing = "The session has nothing to draw here."
    return drawn.figure(found or Chart(key, question, "", nothing), dark=dark)


def _charts(session: Session) -> dict[str, Chart]:
    """All charts that the report has of this session, by their keys."""
    for known, charts in _read:
        if known() is session:
            return charts
    from analysis import series
    from analysis.judgement.summarizing import summarize
    from analysis.renderers.html.page import sections_of
    from analysis.renderers.html.report import Report

    summary = summarize(session)
    report = Report(summary, series.measure(session, summary))
    charts = {chart.key: chart for section in sections_of(report) for chart in section.charts}
    _read.append((ref(session), charts))
    return charts
