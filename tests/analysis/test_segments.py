# SPDX-License-Identifier: Apache-2.0
"""Sessions that were cut into segments say what they said before."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import booleans, floats, lists

from analysis import Session, SessionError, open_session, summarize
from analysis.renderers import json as as_json
from analysis.tables.find import find_session
from analysis.tables.window import Window
from benchmarks import large_session, packed_session
from tests.analysis.builder import COLUMNS, SessionBuilder
from tests.analysis.invoke import invoke
from tests.analysis.stories import swept
from tests.live import figures
from tests.report import generated
from tests.support import segments

Figures = dict[str, Any]


def said(folder: Path, **options: Any) -> Figures:
    """All figures of a session, without its folder's name."""
    found: Figures = json.loads(as_json.render(summarize(open_session(folder, **options))))
    del found["session"]["directory"]
    return found


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """What differs, by its key. Polars adds floats up in any order, so their last digits may."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other})
        parts = [differences(one.get(key), other.get(key), f"{at}.{key}") for key in keys]
        return [*chain(*parts)]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [*chain(*(differences(*pair, f"{at}[{number}]") for number, pair in pairs))]
    if isinstance(one, float) and isinstance(other, float):
        is_same = math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    else:
        is_same = one == other
    return [] if is_same else [f"{at}: {one!r} and {other!r}"]


class Stories:
    """Sessions of several kinds, and what is said of them."""

    def __init__(self, base: Path) -> None:
        swept(SessionBuilder(base / "swept"))
        generated.write(base / "busy", 100)
        large_session.write(base / "large", 2_000)
        self.said = {folder: said(folder) for folder in sorted(base.iterdir())}


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Stories:
    return Stories(tmp_path_factory.mktemp("stories"))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shares=lists(floats(0, 1), max_size=4), closing=booleans())
def test_wherever_it_is_cut_it_says_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    stories: Stories,
    shares: list[float],
    closing: bool,
) -> None:
    base = tmp_path_factory.mktemp("cut")
    for folder, expected in stories.said.items():
        copy = shutil.copytree(folder, base / folder.name)
        cuts = [segments.by_share(copy, share) for share in sorted(shares)]
        segments.split(copy, *cuts, closing=closing)
        assert differences(said(copy), expected) == []


def test_a_benchmark_packs_it_as_the_collector_does(
    tmp_path: Path, stories: Stories, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = next(folder for folder in stories.said if folder.name == "large")
    monkeypatch.setattr(packed_session, "SEGMENT_BYTES", 150_000)
    packed_session.write(plain, tmp_path / plain.name, large_session.SECONDS)
    assert len(list((tmp_path / plain.name / "segments").iterdir())) == 4
    assert differences(said(tmp_path / plain.name), stories.said[plain]) == []


def totals(**changes: Any) -> dict[str, Any]:
    """A totals.json of two engines, the second one idle."""
    found = figures.totals()
    (engine,) = found["engines"]
    (pool,) = engine["pools"]
    evicted = {"group": 0, "origin": "prompt", "copies_left": 0}
    moved = {"reused_blocks": 1, "cached_blocks": 2, "freed_blocks": 3}
    used = {
        **pool,
        "groups": [{"group": 0, "allocated_blocks": 9_000, **moved}],
        "evictions": [
            {**evicted, "reason": "reallocated", "blocks": 7_000, "never_reused": 600},
            {**evicted, "reason": "reset", "blocks": 50, "never_reused": 5},
        ],
    }
    hits = {"requests": 120, "query_tokens": 10**20, "hit_tokens": 10**20 // 4}
    served = {
        "finished": {"stop": 90, "abort": 10},
        "prompt_tokens": 10**13,
        "output_tokens": 2_000,
        "preemptions": 3,
    }
    nothing = dict.fromkeys(("requests", "query_tokens", "hit_tokens"), 0)
    busy = {
        **engine,
        "pools": [used],
        "prefix_cache": {**engine["prefix_cache"], **hits},
        "requests": {**engine["requests"], **served},
    }
    idle = {
        **engine,
        "engine": 5,
        "pools": [],
        "prefix_cache": {**engine["prefix_cache"], **nothing},
        "requests": {**engine["requests"], **dict.fromkeys(served, 0), "finished": {}},
    }
    return {
        **found,
        "until_ns": 7_200_000_000_000,
        "peak_held_blocks": 77,
        "engines": [busy, idle],
        **changes,
    }


REMOVED = 609
"""Bytes of the two segments that are removed from the session below."""


@pytest.fixture
def left(session: SessionBuilder) -> SessionBuilder:
    """What is left from second 4 on of a run of 10 s."""
    session.usage((1, 10), (3, 30), (5, 50), (7, 70))
    session.requests(
        *(
            {"timestamp": 1000 * sec, "finish_sec": sec + 0.5, "finish_reason": "stop"}
            for sec in (1, 3, 5, 7)
        )
    )
    segments.cut_at(session.folder, 2, 4, 6)
    segments.remove_before(session.folder, 3)
    return session


class TestWindow:
    def test_figures_are_of_it(self, left: SessionBuilder) -> None:
        found = summarize(open_session(left.folder))
        assert found.session.begin_sec == 4
        assert (found.session.window, found.session.duration_sec) == (Window(4, 2, REMOVED), 10)
        usage = found.usage.combined
        assert usage is not None
        # 30 % of the opening until 5 s, 50 % until 7 s, 70 % until 10 s.
        assert usage.mean_pct == pytest.approx((30 + 2 * 50 + 3 * 70) / 6)
        assert found.requests.ended == 2

    def test_what_is_left_out_counts_from_the_beginning_of_the_run(
        self, left: SessionBuilder
    ) -> None:
        assert open_session(left.folder, after_sec=3).begin_sec == 4
        assert open_session(left.folder, after_sec=6).begin_sec == 6
        with pytest.raises(SessionError, match=r"it ends at 10 s"):
            open_session(left.folder, after_sec=10)

    def test_requests_count_from_there_if_it_is_known(self, left: SessionBuilder) -> None:
        begin = [open_session(left.folder, after_requests=n).begin_sec for n in range(2)]
        assert begin == [4, 7]
        found = totals()
        found["engines"][0]["requests"]["finished"] = {"stop": 4}
        (left.folder / "totals.json").write_text(json.dumps(found))
        begin = [open_session(left.folder, after_requests=n).begin_sec for n in range(4)]
        assert begin == [4, 4, 5, 7]
        with pytest.raises(SessionError, match="of its requests 4 have ended, and 4 are"):
            open_session(left.folder, after_requests=4)

    def test_metadata_says_where_it_begins_without_a_closed_segment(
        self, left: SessionBuilder
    ) -> None:
        shutil.rmtree(left.folder / "segments")
        opened = open_session(left.folder)
        assert (opened.begin_sec, opened.window) == (4, Window(4, 2, REMOVED))

    def test_nothing_has_come_since(self, left: SessionBuilder) -> None:
        left.metadata(window={"begin_sec": 8.5, "removed_segments": 2}, ended_at=None)
        shutil.rmtree(left.folder / "segments")
        with pytest.raises(SessionError, match=r"before 8.5 s was removed, and nothing has come"):
            open_session(left.folder)

    @pytest.mark.parametrize("said", [{}, {"begin_sec": "x"}, [], 7, None, {"begin_sec": 0}])
    def test_metadata_that_says_nonsense(self, left: SessionBuilder, said: Any) -> None:
        left.metadata(window=said)
        assert open_session(left.folder).begin_sec == 4
        shutil.rmtree(left.folder / "segments")
        assert open_session(left.folder).window is None

    def test_the_first_segment_is_no_window(self, session: SessionBuilder) -> None:
        session.usage((1, 10), (3, 30))
        segments.cut_at(session.folder, 2)
        session.metadata(window={"begin_sec": 1, "removed_segments": 1, "removed_bytes": 1})
        assert open_session(session.folder).window is None

    def test_the_text_says_so(self, left: SessionBuilder) -> None:
        text = " ".join(invoke("summary", left.folder).stdout.split())
        assert (
            "Window: The figures below are of the last 6.00 s: what came before was removed to "
            "stay within VLLM_PROFILING_KEEP. Prompts of before, unless asked for since, count as "
            "new."
        ) in text
        assert "Warm-up left out" not in text
        later = " ".join(invoke("summary", left.folder, "--after", "5s").stdout.split())
        assert "The figures below are of the last 5.00 s: what came" in later
        assert "Warm-up left out: the first 5.00 s of 10.00 s" in later
        page = report(left.folder)
        assert "The figures below are of the last 6.00 s: what came before was removed" in page

    def test_the_whole_run_has_a_section(self, left: SessionBuilder) -> None:
        assert "The whole run" not in invoke("summary", "--full", left.folder).stdout
        (left.folder / "totals.json").write_text(json.dumps(totals()))
        text = " ".join(
            invoke("summary", "--full", left.folder).stdout.split("The whole run")[1].split()
        )
        assert "Time 2 h 00 min 00 s, with what was removed" in text
        assert "Requests 120 admitted, 100 ended (90 stop, 10 abort)" in text
        assert "Tokens 10,000,000,000,000 in, 2,000 out" in text
        assert "Hit rate 25.00 %" in text
        assert "Preemptions 3 Blocks allocated 9,000 Blocks evicted 7,050 (605 never" in text
        assert "Most held 77 blocks at once" in text
        page = report(left.folder)
        assert '<h2 id="whole-run-heading">The whole run</h2>' in page
        assert "7,050 (605 never reused)" in page
        run = said(left.folder)["run"]
        assert (run["until_sec"], run["evicted_blocks"], run["token_rate"]) == (7200, 7050, 0.25)

    def test_where_nothing_was_removed_it_has_none(self, session: SessionBuilder) -> None:
        session.usage((1, 10))
        (session.folder / "totals.json").write_text(json.dumps(totals()))
        assert "The whole run" not in invoke("summary", "--full", session.folder).stdout
        assert said(session.folder)["run"]["ended"] == 100

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ("", "it is not JSON"),
            ("[]", "it is []"),
            ("[" * 10**5, "it is not JSON"),
            ('{"format_version": 1}', "session_id is missing"),
            (json.dumps(totals(until_ns=-1)), "until_ns is -1"),
        ],
    )
    def test_totals_that_are_damaged(self, left: SessionBuilder, content: str, says: str) -> None:
        path = left.folder / "totals.json"
        path.write_text(content)
        with pytest.raises(SessionError) as caught:
            summarize(open_session(left.folder))
        assert str(caught.value) == (
            f"{path} is damaged: {says}; restore the recorded file, or remove it"
        )

    def test_totals_of_a_newer_release(self, left: SessionBuilder) -> None:
        (left.folder / "totals.json").write_text('{"format_version": 2}')
        assert summarize(open_session(left.folder)).run is None


class TestOpenings:
    def test_rows_need_not_be_in_order(self, session: SessionBuilder) -> None:
        """They are sums, in whatever order the collector has them."""
        rows = [
            {"timestamp_sec": time, "event": "allocate", "num_blocks": blocks, "request_id": name}
            for time, blocks, name in ((1, 1, "a"), (2, 2, "b"), (3, 3, "c"), (5, 5, "d"))
        ]
        session.rows("kv_cache_allocations.csv", *rows)
        session.usage((1, 6), (5, 11))
        segments.cut_at(session.folder, 4)
        backwards(session.folder / "segments" / "0001", "kv_cache_allocations.csv")
        opened = as_second(session.folder)
        times = opened.scan("kv_cache_allocations", history=True).collect()["timestamp_sec"]
        assert times.to_list() == [1, 2, 3, 5]
        assert opened.scan("kv_cache_allocations").collect().height == 1
        found = summarize(opened).holders
        assert found is not None
        assert (found.held_blocks, found.blocks) == (11, 11)

    def test_one_at_the_very_beginning_is_history(self, session: SessionBuilder) -> None:
        session.usage((1, 10), (4.000001, 30), (5, 50))
        segments.split(session.folder, {"kv_cache_usage.csv": 2}, times=[4])
        opened = as_second(session.folder)
        assert opened.scan("kv_cache_usage").collect()["timestamp_sec"].to_list() == [5]
        assert opened.scan("kv_cache_usage", history=True).collect().height == 3
        usage = summarize(opened).usage.combined
        assert usage is not None
        assert usage.mean_pct == pytest.approx((30 + 5 * 50) / 6)

    def test_one_that_is_later_is_damage(self, session: SessionBuilder) -> None:
        session.usage((1, 10), (4.5, 30), (5, 50))
        segments.split(session.folder, {"kv_cache_usage.csv": 2}, times=[4])
        opened = as_second(session.folder)
        with pytest.raises(SessionError) as caught:
            summarize(opened)
        assert (
            "opening.kv_cache_usage.csv.gz, line 3: timestamp_sec is 4.500000, but its segment "
            "begins at 4.000000 s; restore"
        ) in str(caught.value)

    def test_each_row_is_sound_by_itself(self, session: SessionBuilder) -> None:
        session.usage((1, 10), (5, 50))
        session.append("kv_cache_usage.csv", "6,101.00,1,1,0,0,0,0,0,0\n")
        segments.split(session.folder, {"kv_cache_usage.csv": 1}, times=[4])
        session.append("kv_cache_usage.csv", "7,1.00,1,100,0,99,0,0,0,0\n")
        folder = session.folder / "segments" / "0001"
        segments.add(
            folder,
            "kv_cache_usage.0001.csv.gz",
            "kv_cache_usage.csv",
            [b"1,101.00,1,1,0,0,0,0,0,0\n"],
            f"{COLUMNS['kv_cache_usage.csv']}\n".encode(),
        )
        (session.folder / "kv_cache_usage.csv").write_text(
            f"{COLUMNS['kv_cache_usage.csv']}\n7,1.00,1,100,0,99,0,0,0,0\n"
        )
        with pytest.raises(SessionError, match=r"opening.kv_cache_usage.csv.gz, line 2: usage_pct"):
            summarize(as_second(session.folder))

    def test_that_would_fill_the_memory(
        self, session: SessionBuilder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("analysis.tables.reading._LARGEST_OPENING", 100)
        session.usage((1, 10), (5, 50))
        segments.split(session.folder, {"kv_cache_usage.csv": 1}, times=[4])
        with pytest.raises(SessionError, match=r"opening.kv_cache_usage.csv.gz: larger than"):
            summarize(as_second(session.folder))

    def test_only_those_of_the_first_segment_count(self, session: SessionBuilder) -> None:
        session.usage((1, 10), (3, 30), (5, 50))
        segments.cut_at(session.folder, 2, 4)
        for number in (1, 2):
            segments.add(
                session.folder / "segments" / f"{number:04d}",
                "opening.kv_cache_usage.csv.gz",
                "kv_cache_usage.csv",
                [b"0.5,1.00,1,100,0,99,0,0,0,0\n"],
                f"{COLUMNS['kv_cache_usage.csv']}\n".encode(),
            )
        found = open_session(session.folder).scan("kv_cache_usage", history=True).collect()
        assert found["timestamp_sec"].to_list() == [1, 3, 5]


def backwards(segment: Path, file: str) -> None:
    """Turn the rows of a segment's table around."""
    stem, _, kind = file.rpartition(".")
    name = f"{stem}.{segment.name}.{kind}.gz"
    header, *rows = gzip.decompress((segment / name).read_bytes()).splitlines(keepends=True)
    segments.add(segment, name, file, rows[::-1], header)


def as_second(folder: Path) -> Session:
    """The session, if all rows of its first segment were the opening of a second one."""
    first, second = folder / "segments" / "0001", folder / "segments" / "0002"
    first.rename(second)

    def to_opening(index: dict[str, Any]) -> None:
        tables = index["tables"]
        for name in list(tables):
            opening = f"opening.{name.replace('.0001', '')}"
            (second / name).rename(second / opening)
            tables[opening] = tables.pop(name)
        index["begin_sec"] = index["end_sec"]

    segments.change(second, to_opening)
    return open_session(folder)


def report(folder: Path) -> str:
    """The page of a session."""
    result = invoke("report", folder, "-o", folder.parent / "page.html")
    assert (result.returncode, result.stderr) == (0, "")
    return (folder.parent / "page.html").read_text()


class TestCommands:
    def test_one_that_has_rows_in_segments_alone(self, session: SessionBuilder) -> None:
        session.usage((1, 10), (3, 30))
        (session.folder / "metadata.json").unlink()
        segments.cut_at(session.folder, 4)
        assert not (session.folder / "kv_cache_usage.csv").exists()
        assert find_session(session.folder.parent) == session.folder
        result = invoke("check", session.folder.parent, "--fail-if", "usage_mean>99%")
        assert result.returncode == 0

    def test_segments_of_something_else_are_no_session(self, tmp_path: Path) -> None:
        (tmp_path / "segments" / "film").mkdir(parents=True)
        with pytest.raises(SessionError, match="no session in"):
            find_session(tmp_path)

    def test_a_page_does_not_replace_what_is_recorded(self, left: SessionBuilder) -> None:
        for name in ("totals.json", "segments/0003/segment.json", "segments/0003/page.html"):
            result = invoke("report", left.folder, "-o", left.folder / name)
            assert result.returncode == 2
            assert "the session keeps its own record there" in " ".join(result.stderr.split())

    def test_finalize_leaves_it_as_it_is(self, left: SessionBuilder) -> None:
        before = {path: path.read_bytes() for path in left.folder.rglob("*") if path.is_file()}
        result = invoke("finalize", left.folder)
        assert (result.returncode, result.stdout) == (0, f"{left.folder} is complete\n")
        after = {path: path.read_bytes() for path in left.folder.rglob("*") if path.is_file()}
        assert after == before

    def test_compare_names_what_each_is_of(self, left: SessionBuilder, tmp_path: Path) -> None:
        other = SessionBuilder(tmp_path / "other")
        other.usage((1, 10))
        text = invoke("compare", left.folder, other.folder).stdout
        assert "the last 6.00 s of 10.00 s, complete" in text

    def test_vllm_counts_more_than_what_is_left(self, left: SessionBuilder) -> None:
        page = left.folder / "metrics.txt"
        page.write_text(
            'vllm:request_success_total{finished_reason="stop"} 9\nvllm:generation_tokens_total 0\n'
        )
        result = invoke("reconcile", left.folder, "--metrics-file", page)
        assert "was removed" in " ".join(result.stdout.split())
        assert result.returncode == 0
        # It cannot have counted fewer.
        page.write_text('vllm:request_success_total{finished_reason="stop"} 1\n')
        assert invoke("reconcile", left.folder, "--metrics-file", page).returncode == 1
