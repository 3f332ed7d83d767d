# SPDX-License-Identifier: Apache-2.0
"""What is left of a run says what the whole run says of the same time, but for its history."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from analysis import open_session, series, summarize
from tests.analysis.invoke import invoke
from tests.analysis.test_segments import differences, said
from tests.situations.bench import Bench
from tests.support import segments
from tests.support.scheduler import trace_requests

WITHOUT_HISTORY = (
    # Contents that were asked for before, and not since, look new. So fewer misses are known to be
    # due to an eviction, and fewer evictions to be a loss; gaps between two uses are not known.
    *(".misses.", ".blame.", ".evictions.harmless", ".evictions.regretted.", ".ages.later"),
    *(".evictions.rate.intervals[", ".ages.reuses", ".sharing.", ".rent.", ".findings", ".advice"),
    # The same by whom, for conversations that began before, and for what requests can share.
    *(".by_whom.", ".conversations.", ".head_room.room."),
    # Requests that were admitted before do not count.
    *(".ages.at_hit_requests.", ".ages.at_eviction_requests."),
    # A refused lookup that began before, and goes on, is not known: why a request waited is not.
    ".waiting.by_reason",
    ".session.window",
)


@pytest.fixture
def recorded(bench: Bench) -> Path:
    """A run of seven seconds in a pool that is far too small for it, with some aborts."""
    engine = bench.engine(300, max_num_seqs=16)
    pending = list(trace_requests(bench.request, 250))[::-1]
    steps = 0
    while pending or engine.scheduler.has_unfinished_requests():
        if steps % 3 == 0 and pending:
            engine.add(pending.pop()[1])
        if steps % 41 == 40:
            engine.abort(*list(engine.scheduler.requests)[:1])
        engine.step()
        steps += 1
    return engine.end().folder


def test_the_window_is_the_same_time_of_the_whole(recorded: Path, tmp_path: Path) -> None:
    for sec in (1.0, 3.0, 3.015, 5.0, 6.5):
        left = shutil.copytree(recorded, tmp_path / f"{sec}" / recorded.name)
        segments.cut_at(left, 0.5, sec, (sec + 7) / 2)
        begin_sec = segments.remove_before(left, 3)
        found, whole = said(left), said(recorded, after_sec=begin_sec)
        assert whole["allocations"]["allocated"]["blocks"] > 100
        assert whole["holders"] is not None
        unexpected = [
            each for each in differences(found, whole) if not each.startswith(WITHOUT_HISTORY)
        ]
        assert unexpected == []
        # Later parts of the window are the same, too.
        later = said(left, after_sec=sec + 0.25), said(recorded, after_sec=sec + 0.25)
        unexpected = [each for each in differences(*later) if not each.startswith(WITHOUT_HISTORY)]
        assert unexpected == []


def test_a_snapshot_is_the_same_time_of_the_session(recorded: Path) -> None:
    segments.cut_at(recorded, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    for last, first in (("3s", 5), ("5.2s", 3), ("60s", 1)):
        result = invoke("snapshot", recorded, "--last", last, "-o", recorded.parent / last)
        assert (result.returncode, result.stderr) == (0, "")
        snapshot = recorded.parent / last
        whole = said(recorded, after_sec=float(first - 1))
        found = said(snapshot)
        assert (found["session"]["begin_sec"], found["session"]["state"]) == (first - 1, "complete")
        of_a_snapshot = (".session.", ".cost.table_bytes")
        history = () if first == 1 else WITHOUT_HISTORY
        unexpected = [
            each
            for each in differences(found, whole)
            if not each.startswith((*of_a_snapshot, *history))
        ]
        assert unexpected == []


def test_its_charts_begin_with_it(recorded: Path) -> None:
    segments.cut_at(recorded, 0.5, 3.0)
    segments.remove_before(recorded, 2)
    opened = open_session(recorded)
    assert series.measure(opened, summarize(opened)).bins.begin_sec == 0.5
