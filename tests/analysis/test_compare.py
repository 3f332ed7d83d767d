# SPDX-License-Identifier: Apache-2.0
"""Sessions side by side: what differs, what changed, and when that says nothing."""

from __future__ import annotations

import html
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import analysis
from analysis import Comparison, RuleError, open_session
from analysis.judgement import measures
from analysis.judgement.comparison import Change, Row
from analysis.renderers import json as json_renderer
from analysis.renderers.html.compare import render as page
from analysis.renderers.text.compare import render as text
from analysis.wording.measures import NOTHING_DIFFERS
from tests.analysis.builder import METADATA, SessionBuilder
from tests.analysis.invoke import invoke
from tests.analysis.test_cli import PROFILEMATE, assert_fails, run
from tests.analysis.test_json import keys

ROOT = Path(__file__).parent.parent.parent
DOCUMENTATION = ROOT / "docs" / "compare-and-check.md"


def load(session: SessionBuilder, *, hits: int, evictions: int, preemptions: int = 0) -> None:
    """20 requests of 100 tokens each, of which ``hits`` found 80."""
    session.usage((0, 50))
    session.lookups(
        *(
            {"request_id": f"r{number}", "query_tokens": 100, "hit_tokens": 80 * (number < hits)}
            for number in range(20)
        )
    )
    session.requests(*[{"input_length": 100, "output_length": 10, "finish_reason": "stop"}] * 20)
    session.evictions(*[{"lifetime_sec": 2, "idle_sec": 1}] * evictions)
    taken = {"event": "allocate", "num_blocks": evictions, "evicted_blocks": evictions}
    session.rows("kv_cache_allocations.csv", taken)
    session.rows("scheduler_steps.csv", {"preempted_reqs": preemptions})


@pytest.fixture
def before(tmp_path: Path) -> SessionBuilder:
    session = SessionBuilder(tmp_path / "session_20260131_120000_1_aaaaaa")
    session.metadata(session_id="before")
    load(session, hits=5, evictions=8)
    return session


@pytest.fixture
def after(tmp_path: Path) -> SessionBuilder:
    """Twice as large a pool."""
    session = SessionBuilder(tmp_path / "session_20260131_130000_2_bbbbbb")
    larger = {**METADATA["cache"], "blocks": 202, "tokens": 3232, "max_concurrency": 3.232}
    session.metadata(session_id="after", cache=larger)
    load(session, hits=10, evictions=6, preemptions=3)
    return session


def compared(*sessions: SessionBuilder) -> Comparison:
    return analysis.compare(*(open_session(session.folder) for session in sessions))


def row(found: Comparison, name: str) -> Row:
    (wanted,) = (row for row in found.measures if row.name == name)
    return wanted


def test_the_changes_are_from_the_first_session(
    before: SessionBuilder, after: SessionBuilder
) -> None:
    found = compared(before, after)
    assert found.doubts == ((),)
    assert [row.name for row in found.measures] == [m.name for m in measures.CATALOGUE]
    # 5 of 20 requests found 80 of 100 tokens, then 10 of 20.
    rate = row(found, "hit_rate")
    assert rate.values == (0.2, 0.4)
    assert rate.changes == (Change(pytest.approx(0.2), pytest.approx(1), "better"),)
    assert row(found, "evictions").values == (8, 6)
    assert row(found, "evictions").changes == (Change(-2, -0.25, "better"),)
    # Nothing is no base for a share.
    assert row(found, "preemptions").changes == (Change(3, None, "worse"),)
    assert row(found, "aborted").changes == (Change(0, None, "same"),)
    # More or fewer of it is neither better nor worse.
    assert row(found, "hit_tokens").changes == (Change(400, 1, None),)
    assert row(found, "too_large").changes[0].verdict == "same"


def test_a_change_of_one_per_cent_is_the_same(
    before: SessionBuilder, after: SessionBuilder
) -> None:
    before.evictions(*[{}] * 92)
    after.evictions(*[{}] * 95)
    assert row(compared(before, after), "evictions").changes == (Change(1, 0.01, "same"),)
    after.evictions({})
    assert row(compared(before, after), "evictions").changes == (Change(2, 0.02, "worse"),)


def test_what_has_no_value_has_no_change(before: SessionBuilder, after: SessionBuilder) -> None:
    (after.folder / "kv_cache_evictions.csv").unlink()
    lifetime = row(compared(before, after), "lifetime_p50")
    assert lifetime.values == (2, None)
    assert lifetime.changes == (Change(None, None, None),)


def test_settings_that_differ_are_named(before: SessionBuilder, after: SessionBuilder) -> None:
    versions = {**METADATA["versions"], "vllm": "0.31.0"}
    groups = [*METADATA["groups"], {"kind": "MambaSpec", "block_size": 64}]
    scheduler = {"max_num_seqs": 128, "policy": "fcfs", "watermark": None}
    after.metadata(
        versions=versions, groups=groups, scheduler=scheduler, host="gpu-2", argv=["vllm"]
    )
    before.metadata(scheduler={"max_num_seqs": 256, "policy": "fcfs"})
    found = compared(before, after)
    assert {setting.name: setting.values for setting in found.configuration} == {
        "host": ("gpu-1", "gpu-2"),
        "versions.vllm": ("0.32.0", "0.31.0"),
        "groups[1].kind": (None, "MambaSpec"),
        "groups[1].block_size": (None, "64"),
        "scheduler.max_num_seqs": ("256", "128"),
    }


def test_the_settings_of_a_larger_pool(before: SessionBuilder, after: SessionBuilder) -> None:
    found = compared(before, after)
    assert {setting.name: setting.values for setting in found.configuration} == {
        "cache.blocks": ("101", "202"),
        "cache.tokens": ("1616", "3232"),
        "cache.max_concurrency": ("1.616", "3.232"),
    }


def test_three_sessions_are_held_against_the_first(
    before: SessionBuilder, after: SessionBuilder, tmp_path: Path
) -> None:
    third = SessionBuilder(tmp_path / "third")
    load(third, hits=2, evictions=8)
    rate = row(compared(before, after, third), "hit_rate")
    assert rate.values == pytest.approx((0.2, 0.4, 0.08))
    assert [change.verdict for change in rate.changes] == ["better", "worse"]


class TestDoubts:
    def doubts(self, before: SessionBuilder, after: SessionBuilder) -> str:
        """The doubts about the two. With a doubt, no change is called better or worse."""
        found = compared(before, after)
        assert {change.verdict for row in found.measures for change in row.changes} == {None}
        assert row(found, "hit_rate").values == (0.2, 0.4)
        return " ".join(found.doubts[0])

    def test_another_model(self, before: SessionBuilder, after: SessionBuilder) -> None:
        after.metadata(model={**METADATA["model"], "name": "large"})
        assert self.doubts(before, after) == "The models differ: tiny in A, large in B."
        after.metadata(model=None)
        assert self.doubts(before, after) == "The model of B is not known."

    def test_other_requests(self, before: SessionBuilder, after: SessionBuilder) -> None:
        after.requests({"input_length": 50, "output_length": 10})
        assert self.doubts(before, after) == (
            "The requests differ: B has 1 more requests that ended than A (21, not 20). "
            "The requests differ: B has 50 more prompt tokens than A (2,050, not 2,000)."
        )

    def test_other_answers(self, before: SessionBuilder, after: SessionBuilder) -> None:
        (after.folder / "requests.jsonl").unlink()
        same = {"input_length": 100}
        after.requests(*[{**same, "output_length": 10}] * 19, {**same, "output_length": 20})
        assert compared(before, after).doubts == ((),)
        (after.folder / "requests.jsonl").unlink()
        after.requests(*[{**same, "output_length": 10}] * 19, {**same, "output_length": 21})
        said = "The requests differ: B has 11 more generated tokens than A (211, not 200)."
        assert self.doubts(before, after) == said

    def test_other_prompts(self, before: SessionBuilder, after: SessionBuilder) -> None:
        (after.folder / "requests.jsonl").unlink()
        after.requests(*[{"input_length": 90, "output_length": 10}] * 20)
        said = "The requests differ: B has 200 fewer prompt tokens than A (1,800, not 2,000)."
        assert self.doubts(before, after) == said

    def test_one_per_cent_more_is_no_other_load(
        self, before: SessionBuilder, after: SessionBuilder
    ) -> None:
        (after.folder / "requests.jsonl").unlink()
        after.requests(*[{"input_length": 101, "output_length": 10}] * 20)
        assert compared(before, after).doubts == ((),)

    def test_one_that_is_not_complete(self, before: SessionBuilder, after: SessionBuilder) -> None:
        before.metadata(complete=False)
        said = "A is cut off: all that was recorded is in the tables, but the record has gaps"
        assert self.doubts(before, after).startswith(said)

    def test_one_that_is_too_short(self, before: SessionBuilder, after: SessionBuilder) -> None:
        after.metadata(ended_at="2026-01-31T12:00:09.500000Z")
        assert self.doubts(before, after) == "B is too short: 9.5 s, and 10 s are needed."

    def test_too_few_requests(self, before: SessionBuilder, after: SessionBuilder) -> None:
        for session in (before, after):
            (session.folder / "requests.jsonl").unlink()
            session.requests(*[{"input_length": 100}] * 19)
        said = "is too short: 19 requests have ended, and 20 are needed."
        assert self.doubts(before, after) == f"A {said} B {said}"


def test_sessions_that_cannot_be_compared_at_all(before: SessionBuilder) -> None:
    with pytest.raises(RuleError, match="1 to compare; name 2 to 26 sessions"):
        compared(before)
    with pytest.raises(RuleError, match="A and B are the same session"):
        compared(before, before)


def one_line(rendered: str) -> str:
    return " ".join(rendered.split())


class TestText:
    def test_each_measure_is_a_line(self, before: SessionBuilder, after: SessionBuilder) -> None:
        rendered = text(compared(before, after))
        words = one_line(rendered)
        assert "A before (the baseline)" in words
        assert "cache.blocks 101 202" in words
        assert "hit_rate 20.00 % 40.00 % +20.00 points +100.0 % better" in words
        assert "evictions 8 6 -2 -25.0 % better" in words
        assert "preemptions 0 3 +3 worse" in words
        assert "usage_mean 50.00 % 50.00 % none lifetime" not in words
        assert "lifetime_p50 2.00 s 2.00 s none" in words
        # No request has recorded when its first token came: no value in either session.
        assert "first_token" not in words
        assert rendered.isascii()

    def test_doubts_come_first(self, before: SessionBuilder, after: SessionBuilder) -> None:
        after.metadata(model={**METADATA["model"], "name": "large"})
        rendered = one_line(text(compared(before, after)))
        doubt = rendered.index("Not comparable, so no change is called better or worse:")
        assert doubt < rendered.index("The models differ") < rendered.index("hit_rate")
        assert "better hit" not in rendered
        assert "% worse" not in rendered

    def test_no_line_is_wider_than_80_columns(
        self, before: SessionBuilder, after: SessionBuilder
    ) -> None:
        many = 10**8
        before.metadata(host="h" * 60, model={"name": "organisation/" + "long-name-" * 12})
        for session, factor in ((before, 1), (after, 3)):
            session.requests(*[{"input_length": many, "output_length": many}] * factor)
            session.rows("kv_cache_allocations.csv", {"event": "allocate", "num_blocks": many})
        lines = text(compared(before, after)).splitlines()
        wide = [line for line in lines if len(line) > 80 and str(before.folder.parent) not in line]
        assert wide == []
        assert all(line == line.rstrip() for line in lines)

    def test_equal_settings(self, before: SessionBuilder, tmp_path: Path) -> None:
        other = SessionBuilder(tmp_path / "other")
        load(other, hits=5, evictions=8)
        assert NOTHING_DIFFERS in " ".join(text(compared(before, other)).split())


class TestPage:
    def test_it_holds_what_the_text_holds(
        self, before: SessionBuilder, after: SessionBuilder
    ) -> None:
        rendered = page(compared(before, after))
        plain = one_line(html.unescape(re.sub("<[^>]*>", " ", rendered)))
        assert "Higher is better. 20.00 % 40.00 % +20.00 points +100.0 % better" in plain
        assert "cache.blocks 101 202" in plain
        assert rendered.count("<tr>") == 2 + len(measures.CATALOGUE) + 1 + 3
        assert "://" not in rendered
        assert "<script" not in rendered

    def test_what_the_session_says_stays_text(
        self, before: SessionBuilder, after: SessionBuilder
    ) -> None:
        evil = "<script>alert(1)</script>&\"'\x1b[31m"
        for session in (before, after):
            session.metadata(
                session_id=evil,
                host=evil + session.folder.name,
                model={"name": evil + session.folder.name},
                versions={evil: session.folder.name},
            )
        rendered = page(compared(before, after))
        assert "<script" not in rendered
        assert "\x1b" not in rendered
        # Of either session its id, its model (once more among the doubts) and its host; a setting.
        assert rendered.count("&lt;script&gt;") == 2 * 4 + 1

    def test_no_other_script_or_style_is_fetched(
        self, before: SessionBuilder, after: SessionBuilder
    ) -> None:
        rendered = page(compared(before, after))
        assert re.findall(r"\b(?:src|href)=|\burl\(", rendered) == []


class TestCommand:
    def test_text_json_and_page(
        self, before: SessionBuilder, after: SessionBuilder, tmp_path: Path
    ) -> None:
        folders = (before.folder, after.folder)
        shown = run(PROFILEMATE, "compare", *folders)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout == text(compared(before, after)) + "\n"
        found = json.loads(invoke("compare", *folders, "--json").stdout)
        assert found == json.loads(json_renderer.render(compared(before, after)))
        file = tmp_path / "compare.html"
        assert invoke("compare", *folders, "--html", file).stdout == f"{file} is written\n"
        assert file.read_text() == page(compared(before, after))

    def test_warm_up_is_left_out_of_each(
        self, before: SessionBuilder, after: SessionBuilder
    ) -> None:
        result = invoke("compare", before.folder, after.folder, "--after", "4s")
        assert result.stdout.count("6.00 s after 4.00 s of warm-up, complete") == 2
        assert "A is too short: 6 s, and 10 s are needed." in result.stdout

    def test_bad_use_is_one_line(self, before: SessionBuilder, after: SessionBuilder) -> None:
        folders = (before.folder, after.folder)
        assert_fails(invoke("compare", before.folder), "1 to compare; name 2 to 26")
        assert_fails(invoke("compare", *folders, "--after", "1h"), "nothing is left of")
        nowhere = before.folder / "no" / "file.html"
        assert_fails(invoke("compare", *folders, "--html", nowhere), "cannot write")

    def test_on_a_terminal_it_says_what_it_does(
        self, before: SessionBuilder, after: SessionBuilder
    ) -> None:
        ours, theirs = pty.openpty()
        result = subprocess.run(
            [sys.executable, "-m", "profilemate", "compare", before.folder, after.folder],
            check=True,
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"},
            stdout=subprocess.PIPE,
            stderr=theirs,
        )
        os.close(theirs)
        seen = os.read(ours, 1 << 16)
        os.close(ours)
        assert b"reading the sessions" in seen
        assert result.stdout.decode() == text(compared(before, after)) + "\n"

    def test_help(self) -> None:
        shown = invoke("compare", "--help").stdout
        assert "Examples:" in shown
        assert "Exit codes:" in shown
        assert max(map(len, shown.splitlines())) <= 80


def test_every_key_is_documented(before: SessionBuilder, after: SessionBuilder) -> None:
    after.metadata(model={**METADATA["model"], "name": "large"})
    found: Any = json.loads(json_renderer.render(compared(before, after)))
    assert found["comparison_version"] == 1
    names = set(re.findall(r"`([\w.\[\]]+)`", DOCUMENTATION.read_text()))
    missing = {
        path
        for path in keys({**found, "sessions": []})
        if path not in names and f"{path}[]" not in names
    }
    assert missing == set()
