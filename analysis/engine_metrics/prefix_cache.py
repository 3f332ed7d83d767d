# SPDX-License-Identifier: Apache-2.0
"""Tokens looked up in the prefix cache and tokens found: vLLM's counters and the session's."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.engine_metrics.figures import Row, exact, row, within
from analysis.engine_metrics.moment import Seen
from analysis.engine_metrics.page import Page
from analysis.prefix import prefix_cache
from analysis.prefix.prefix_cache import Lookups, PrefixCache
from analysis.tables.facts import Facts
from analysis.tables.session import Session


def rows(page: Page, seen: Seen, _: Facts) -> Iterator[Row]:
    """Queries, hits, and hits of an external cache."""
    found = prefix_cache.measure(seen.session)
    after = _measured(seen.after())
    closing = _measured(seen.closing())
    note = None
    if found.vllm.rule is None:
        note = "it is not known which lookups this release counts"
    for name, field in (("queries", "query_tokens"), ("hits", "hit_tokens")):
        later = _counted(after, field)
        yield from row(
            f"vllm:prefix_cache_{name}",
            "tokens",
            page.total(f"vllm:prefix_cache_{name}_total"),
            float(getattr(found.true, field)),
            [
                exact("lookups after the page was taken", -later),
                within(
                    "lookups right before it, if not yet counted",
                    later - _counted(closing, field),
                    0.0,
                ),
                exact(
                    "lookups of requests that went on waiting: this release counts each of them",
                    _tokens_of(found.vllm.repeated, field),
                ),
                exact(
                    "lookups of preempted requests, which find their own blocks: this release "
                    "counts them",
                    _tokens_of(found.vllm.resumed, field),
                ),
            ],
            note,
        )
    external = page.total("vllm:external_prefix_cache_hits_total")
    if external is not None and (external or found.true.external_hit_tokens):
        yield from row(
            "vllm:external_prefix_cache_hits",
            "tokens",
            external,
            float(found.true.external_hit_tokens),
            [
                exact(
                    "admissions after the page was taken",
                    -float(after.true.external_hit_tokens) if after else 0.0,
                )
            ],
        )


def _measured(session: Session | None) -> PrefixCache | None:
    return None if session is None else prefix_cache.measure(session)


def _counted(found: PrefixCache | None, field: str) -> float:
    """What vLLM's rule counts of these lookups."""
    return 0.0 if found is None else _tokens_of(found.vllm.counted, field)


def _tokens_of(lookups: Lookups | None, field: str) -> float:
    return 0.0 if lookups is None else float(getattr(lookups, field))
