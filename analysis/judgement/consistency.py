# SPDX-License-Identifier: Apache-2.0
"""Do the tables of a complete session fit each other?

If a table was removed or cut, the figures that rest on it are wrong and look right.
"""

from __future__ import annotations

from collections.abc import Iterator

from analysis.summary import Summary


def contradictions(summary: Summary) -> tuple[str, ...]:
    """A sentence for each pair of tables that do not fit, and one where bytes are missing.

    There is none for a session that is not complete, or the snapshot of one that ran: its tables
    need not reach equally far.
    """
    about = summary.session
    is_uneven = about.snapshot is not None and about.snapshot.was_running
    return tuple(_found(summary)) if about.state == "complete" and not is_uneven else ()


def _found(summary: Summary) -> Iterator[str]:
    written, missing = summary.cost.table_bytes or 0, summary.session.missing_bytes or 0
    if missing:
        yield (
            f"the collector wrote {written:,} bytes of tables, and {written - missing:,} are "
            "there: tables are missing or cut"
        )
    moved, evicted, requests = summary.allocations, summary.evictions, summary.requests
    counted, by_reason = moved.allocated.evicted_blocks, evicted.by_reason
    rows = by_reason["reallocated"].blocks if "reallocated" in by_reason else 0
    if counted != rows:
        yield (
            f"kv_cache_allocations.csv has {counted:,} evictions by allocations, and "
            f"kv_cache_evictions.csv has {rows:,}: rows are missing in one of them"
        )
    if summary.usage.combined is None and (moved.allocated.blocks or rows):
        yield "kv_cache_usage.csv is missing, though requests held blocks"
    admitted = summary.misses.requests
    # After a warm-up, all requests that end may have been admitted before.
    if admitted and not requests.ended and not summary.session.begin_sec:
        yield (
            f"requests.jsonl is missing or empty, though {admitted:,} requests were admitted: the "
            "contents of their prompts are not known"
        )
    served = requests.ended - requests.aborted
    looked_up = admitted + summary.prefix_cache.skipped.lookups
    if summary.facts.prefix_caching and served > looked_up:
        yield (
            f"requests.jsonl has {served:,} requests that were served, and "
            f"prefix_cache_lookups.csv has {looked_up:,} that were admitted: rows are missing in "
            "one of them"
        )
    if served and not summary.preemptions.steps:
        yield "scheduler_steps.csv is missing, though requests were served"
    graphs, ledger = summary.cuda_graphs, summary.graph_ledger
    if graphs.in_graphs and (ledger is None or not ledger.replays):
        yield (
            f"cuda_graph_timeline.csv has {graphs.in_graphs:,} executions in graphs, and "
            "cuda_graph_usage.csv has no replay: rows are missing in it"
        )
