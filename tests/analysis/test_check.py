# SPDX-License-Identifier: Apache-2.0
"""Rules and baselines: what passes, what fails, and what cannot be checked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

import analysis
from analysis import Checked, RuleError, Summary, open_session
from analysis.judgement import check, measures
from analysis.renderers import json as json_renderer
from analysis.renderers.text.check import render as text
from profilemate.commands.shared.values import share
from tests.analysis.builder import METADATA, SessionBuilder
from tests.analysis.invoke import invoke
from tests.analysis.journals import running_session
from tests.analysis.test_cli import PROFILEMATE, assert_fails, run
from tests.analysis.test_compare import load
from tests.analysis.test_json import keys
from tests.analysis.test_measures import FIGURES, known

DOCUMENTATION = Path(__file__).parent.parent.parent / "docs" / "compare-and-check.md"


def summary_of(session: SessionBuilder) -> Summary:
    return analysis.summarize(open_session(session.folder))


class TestRules:
    @pytest.mark.parametrize(
        ("text", "comparator", "limit"),
        [
            ("hit_rate<0.4", "<", 0.4),
            ("hit_rate < 40%", "<", 0.4),
            (" hit_rate >= 40 % ", ">=", 0.4),
            ("usage_p95>90", ">", 90),
            ("usage_p95>90%", ">", 90),
            ("preemptions!=0", "!=", 0),
            ("evictions==1e3", "==", 1000),
            ("evictions<=-.5", "<=", -0.5),
            ("lifetime_p50<5s", "<", 5),
            ("lifetime_p50<500ms", "<", 0.5),
            ("lifetime_p50<2m", "<", 120),
            ("lifetime_p50<1.5h", "<", 5400),
            ("lifetime_p50<7", "<", 7),
        ],
    )
    def test_what_is_a_rule(self, text: str, comparator: str, limit: float) -> None:
        rule = check.rule(text)
        assert (rule.comparator, rule.limit) == (comparator, pytest.approx(limit))
        assert rule.measure.name in text

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "is not a rule; write a measure"),
            ("hit_rate", "is not a rule"),
            ("hit_rate=0.4", "is not a rule"),
            ("0.4>hit_rate", "is not a rule"),
            ("hit_rate<nan", "is not a rule"),
            ("hit_rate<0.4 and preemptions>0", "is not a rule"),
            ("hitrate<0.4", "there is no measure 'hitrate'; perhaps hit_rate"),
            ("hit_rate<3s", "hit_rate cannot be in 's'; it can be in %"),
            ("lifetime_p50<3d", "cannot be in 'd'; it can be in ms or s or m or h"),
            ("preemptions>3%", "preemptions cannot be in '%'; write a plain number"),
            ("hit_rate<40", "the limit would be 4000 %; write 0.4 or 40% for 40 percent"),
            ("hit_rate>140%", "hit_rate is at most 100 %, and the limit would be 140 %"),
            ("usage_p95>950", "usage_p95 is at most 100 %, and the limit would be 950 %"),
            ("evictions<1e999", "the limit is too large a number"),
            ("hit_rate<\u0664", "is not a rule"),
        ],
    )
    def test_what_is_none(self, text: str, says: str) -> None:
        with pytest.raises(RuleError) as caught:
            check.rule(text)
        assert says in str(caught.value)

    @pytest.mark.parametrize(
        ("rule", "failed"),
        [
            # It is 0.24.
            ("hit_rate<0.24", False),
            ("hit_rate<=0.24", True),
            ("hit_rate<0.2400001", True),
            ("hit_rate>0.24", False),
            ("hit_rate>=0.24", True),
            ("hit_rate==0.24", True),
            ("hit_rate!=0.24", False),
            ("hit_rate!=0.25", True),
        ],
    )
    def test_a_rule_fails_where_it_is_true(
        self, session: SessionBuilder, rule: str, failed: bool
    ) -> None:
        known(session)
        checked = check.check(summary_of(session), [rule])
        assert checked.passed is not failed
        (result,) = checked.results
        assert (result.failed, result.value, result.fails_if) == (failed, FIGURES["hit_rate"], rule)

    def test_every_rule_is_judged(self, session: SessionBuilder) -> None:
        known(session)
        rules = ["preemptions>0", "hit_rate<0.2", "evictions>=3"]
        checked = check.check(summary_of(session), rules)
        assert [result.failed for result in checked.results] == [True, False, True]
        assert not checked.passed
        assert check.check(summary_of(session), ["hit_rate<0.2"]).passed

    def test_what_has_no_value_fails(self, session: SessionBuilder) -> None:
        for rule in ("lifetime_p50<5", "lifetime_p50>5", "hit_rate!=0"):
            (result,) = check.check(summary_of(session), [rule]).results
            assert (result.failed, result.value) == (True, None)
            assert result.reason == "the session has no value for it"


@pytest.fixture
def baseline(tmp_path: Path) -> SessionBuilder:
    """A hit rate of 0.4, 100 evictions, no preemption."""
    session = SessionBuilder(tmp_path / "baseline")
    load(session, hits=10, evictions=100)
    return session


class TestBaseline:
    def against(
        self, baseline: SessionBuilder, session: SessionBuilder, percent: float, *only: str
    ) -> Checked:
        found, base = summary_of(session), summary_of(baseline)
        return check.check(found, baseline=base, tolerance=percent / 100, only=only)

    def failed(self, checked: Checked) -> list[str]:
        return [result.measure for result in checked.results if result.failed]

    def test_every_measure_with_a_direction_is_held_against_it(
        self, baseline: SessionBuilder, session: SessionBuilder
    ) -> None:
        # Hit rate 0.36: 10 % less. 106 evictions: 6 % more.
        load(session, hits=9, evictions=106)
        checked = self.against(baseline, session, 5)
        held = [result.measure for result in checked.results]
        figures = measures.of(summary_of(session))
        assert held == [m.name for m in check.directed() if figures[m.name] is not None]
        assert {"hit_rate", "evictions", "preemptions"} < set(held)
        assert {"usage_mean", "lifetime_p50", "hit_tokens"} & set(held) == set()
        assert self.failed(checked) == ["hit_rate", "request_hit_rate", "evictions"]
        rate = checked.results[0]
        assert rate.limit == pytest.approx(0.38)
        assert (rate.value, rate.baseline) == (0.36, 0.4)
        assert rate.fails_if == "hit_rate < baseline - 5 %"
        assert self.failed(self.against(baseline, session, 6)) == ["hit_rate", "request_hit_rate"]
        assert self.against(baseline, session, 10).passed

    @pytest.mark.parametrize(("evictions", "passes"), [(115, True), (116, False), (1, True)])
    def test_exactly_the_tolerance_is_not_worse(
        self, baseline: SessionBuilder, session: SessionBuilder, evictions: int, passes: bool
    ) -> None:
        load(session, hits=10, evictions=evictions)
        assert self.against(baseline, session, 15, "evictions").passed is passes

    def test_nor_is_what_the_last_binary_digit_makes_of_it(
        self, tmp_path: Path, session: SessionBuilder
    ) -> None:
        """A hit rate of 0.6 is a quarter less than 0.8, whatever 0.8 - 0.25 * 0.8 comes to."""
        assert 0.6 < 0.8 - 0.25 * 0.8
        every = SessionBuilder(tmp_path / "every")
        load(every, hits=20, evictions=0)
        load(session, hits=15, evictions=0)
        assert self.against(every, session, 25, "hit_rate").passed
        assert not self.against(every, session, 24.9, "hit_rate").passed

    def test_better_is_never_worse(self, baseline: SessionBuilder, session: SessionBuilder) -> None:
        load(session, hits=20, evictions=0)
        assert self.against(baseline, session, 0).passed
        load_again = self.against(session, baseline, 50)
        # From 0 evictions to 100: no share of 0 is allowed.
        assert "evictions" in self.failed(load_again)

    def test_one_more_than_none_is_worse(
        self, baseline: SessionBuilder, session: SessionBuilder
    ) -> None:
        load(session, hits=10, evictions=100, preemptions=1)
        assert self.failed(self.against(baseline, session, 50)) == ["preemptions"]

    def test_only_the_measures_that_are_named(
        self, baseline: SessionBuilder, session: SessionBuilder
    ) -> None:
        load(session, hits=1, evictions=100)
        assert self.failed(self.against(baseline, session, 5, "hit_rate")) == ["hit_rate"]
        assert self.against(baseline, session, 5, "evictions", "aborted").passed
        with pytest.raises(RuleError, match="usage_mean has no direction"):
            self.against(baseline, session, 5, "usage_mean")
        with pytest.raises(RuleError, match="there is no measure 'evictionz'; perhaps evictions"):
            self.against(baseline, session, 5, "evictionz")

    def test_what_has_no_value_is_passed_over_unless_it_is_named(
        self, baseline: SessionBuilder, session: SessionBuilder
    ) -> None:
        load(session, hits=10, evictions=100)
        (session.folder / "prefix_cache_lookups.csv").unlink()
        assert self.against(baseline, session, 5).passed
        (result,) = self.against(baseline, session, 5, "hit_rate").results
        assert (result.failed, result.reason) == (True, "the session has no value for it")
        (result,) = self.against(session, baseline, 5, "hit_rate").results
        assert (result.failed, result.reason) == (True, "the baseline has no value for it")

    def test_it_says_what_stands_against_it(
        self, baseline: SessionBuilder, session: SessionBuilder
    ) -> None:
        load(session, hits=10, evictions=100)
        assert self.against(baseline, session, 5).doubts == ()
        session.metadata(model={**METADATA["model"], "name": "large"})
        (doubt,) = self.against(baseline, session, 5).doubts
        assert doubt == "The models differ: tiny in the baseline, large in the session."


def test_each_failure_is_a_line(session: SessionBuilder) -> None:
    known(session)
    rules = ["hit_rate<0.4", "preemptions>0", "usage_peak>99", "idle_p95 > 2s"]
    assert text(check.check(summary_of(session), rules)).splitlines() == [
        "FAIL  hit_rate     24 %  (limit 40 %): fails if hit_rate<0.4",
        "FAIL  preemptions     3  (limit 0): fails if preemptions>0",
        "FAIL  idle_p95      5 s  (limit 2 s): fails if idle_p95 > 2s",
        f"{session.folder.name}: 3 of 4 rules failed",
    ]


def test_a_value_just_under_its_limit_does_not_look_like_it(session: SessionBuilder) -> None:
    session.lookups({"query_tokens": 100_000, "hit_tokens": 39_999})
    rendered = text(check.check(summary_of(session), ["hit_rate<0.4"]))
    assert "39.999 %  (limit 40 %)" in rendered


class TestCommand:
    def check(self, *arguments: object) -> tuple[int, str]:
        result = invoke("check", *arguments)
        assert result.stderr == ""
        return result.returncode, result.stdout

    def test_exit_codes(self, session: SessionBuilder) -> None:
        known(session)
        rules = ["--fail-if", "hit_rate<0.2", "--fail-if", "evictions>3"]
        code, said = self.check(session.folder, *rules)
        assert (code, said) == (0, f"{session.folder.name}: 2 rules passed\n")
        code, said = self.check(session.folder, *rules, "--fail-if", "preemptions>0")
        assert code == 1
        assert said.splitlines() == [
            "FAIL  preemptions  3  (limit 0): fails if preemptions>0",
            f"{session.folder.name}: 1 of 3 rules failed",
        ]

    def test_json_has_the_same_exit_codes(self, session: SessionBuilder) -> None:
        known(session)
        for rule, code in (("preemptions>0", 1), ("preemptions>3", 0)):
            result = invoke("check", session.folder, "--fail-if", rule, "--json")
            assert (result.returncode, result.stderr) == (code, "")
            found = json.loads(result.stdout)
            assert found["passed"] is (code == 0)
            assert found["results"][0]["value"] == 3

    def test_warm_up_is_left_out(self, session: SessionBuilder) -> None:
        session.usage((0, 1))
        for time in (1, 5):
            session.evictions({"timestamp_sec": time})
            taken = {"event": "allocate", "num_blocks": 1, "evicted_blocks": 1}
            session.rows("kv_cache_allocations.csv", {"timestamp_sec": time, **taken})
        rule = ["--fail-if", "evictions>1"]
        assert self.check(session.folder, *rule)[0] == 1
        assert self.check(session.folder, *rule, "--after", "2s")[0] == 0

    def test_a_baseline(self, baseline: SessionBuilder, session: SessionBuilder) -> None:
        load(session, hits=9, evictions=100)
        against = [session.folder, "--baseline", baseline.folder]
        assert self.check(*against, "--tolerance", "10%")[0] == 0
        code, said = self.check(*against, "--tolerance", "0.05", "--measure", "hit_rate")
        assert code == 1
        assert said.startswith(
            "FAIL  hit_rate  36 %  (limit 38 %, baseline 40 %): "
            "fails if hit_rate < baseline - 5 %\n"
        )

    def test_a_baseline_that_cannot_be_compared(
        self, baseline: SessionBuilder, session: SessionBuilder
    ) -> None:
        load(session, hits=10, evictions=100)
        session.requests({"input_length": 100, "output_length": 10})
        session.lookups({"request_id": "r20", "query_tokens": 100, "hit_tokens": 80})
        against = [session.folder, "--baseline", baseline.folder]
        result = invoke("check", *against)
        assert_fails(result, "the session has 1 more requests that ended than the baseline")
        assert "--anyway checks all the same" in result.stderr
        result = invoke("check", *against, "--anyway")
        assert result.returncode == 0
        assert result.stdout.endswith("rules passed\n")
        assert result.stderr.startswith("profilemate: note: The requests differ: ")

    def test_warm_up_is_left_out_of_the_baseline_too(
        self, baseline: SessionBuilder, session: SessionBuilder
    ) -> None:
        load(session, hits=10, evictions=100)
        against = [session.folder, "--baseline", baseline.folder, "--after", "0.5s"]
        result = invoke("check", *against)
        assert_fails(result, "the baseline is too short: 9.5 s, and 10 s are needed.")
        assert "the session is too short: 9.5 s, and 10 s are needed." in result.stderr

    def test_a_session_that_still_runs_is_checked_and_said_to(self, tmp_path: Path) -> None:
        session = SessionBuilder(running_session(tmp_path))
        session.metadata(complete=False, ended_at=None)
        session.usage((1, 40), (3, 80))
        result = invoke("check", session.folder, "--fail-if", "usage_peak>79")
        assert result.returncode == 1
        assert "is running: what follows goes up to its last finished line" in result.stderr

    def test_bad_use_is_one_line(self, session: SessionBuilder, tmp_path: Path) -> None:
        def fails(says: str, *arguments: object) -> None:
            assert_fails(invoke("check", *arguments), says)

        folder = session.folder
        fails("nothing to check; give --fail-if", folder)
        fails("there is no folder", tmp_path / "nowhere", "--fail-if", "evictions>0")
        fails("perhaps evictions", folder, "--fail-if", "eviction>0")
        fails("need --baseline", folder, "--fail-if", "evictions>0", "--measure", "evictions")
        fails("has no direction", folder, "--baseline", folder, "--measure", "usage_mean")
        fails("nothing is left of", folder, "--fail-if", "evictions>0", "--after", "10s")
        of_label = "hit_rate{label=chat} is of a label; say with --labels FILE"
        fails(of_label, folder, "--fail-if", "hit_rate{label=chat}<0.4")
        fails(of_label, folder, "--baseline", folder, "--measure", "hit_rate{label=chat}")

    def test_nothing_is_no_pass(self, session: SessionBuilder, tmp_path: Path) -> None:
        rule = ["--fail-if", "evictions>0"]
        assert_fails(invoke("check", session.folder, *rule), "has no table, so there is nothing")
        other = SessionBuilder(tmp_path / "other")
        other.usage((0, 1))
        result = invoke("check", other.folder, "--baseline", session.folder, "--anyway")
        assert_fails(result, f"{session.folder} has no table")
        link = tmp_path / "link"
        link.symlink_to(other.folder)
        result = invoke("check", other.folder, "--baseline", link, "--anyway")
        assert_fails(result, "the session and the baseline are the same")

    def test_tables_that_are_not_whole_are_no_pass(
        self, baseline: SessionBuilder, session: SessionBuilder
    ) -> None:
        load(session, hits=10, evictions=100)
        evictions = session.folder / "kv_cache_evictions.csv"
        evictions.write_text(evictions.read_text().splitlines()[0] + "\n")
        says = "has 100 evictions by allocations, and kv_cache_evictions.csv has 0: rows are"
        for arguments in (
            [session.folder, "--fail-if", "evictions>0"],
            [session.folder, "--fail-if", "preemptions>0", "--json"],
            [session.folder, "--baseline", baseline.folder, "--anyway"],
            [baseline.folder, "--baseline", session.folder],
        ):
            assert_fails(invoke("check", *arguments), says)
        session.metadata(complete=False, ended_at=None)
        result = invoke("check", session.folder, "--fail-if", "evictions>0")
        assert (result.returncode, result.stdout.count("passed")) == (0, 1)
        assert "is cut off" in result.stderr

    def test_the_measures_can_be_listed(self) -> None:
        code, said = self.check("--list")
        assert code == 0
        first_words = [line.split()[0] for line in said.splitlines() if line[2:3].strip()]
        assert first_words == [measure.name for measure in measures.CATALOGUE]
        assert "hit_rate share, higher is better Prompt tokens found" in " ".join(said.split())

    def test_the_measures_can_be_listed_for_programs(self) -> None:
        code, said = self.check("--list", "--json")
        listed = json.loads(said)
        assert code == 0
        assert [one["name"] for one in listed] == [one.name for one in measures.CATALOGUE]
        assert set(listed[0]) == {"name", "unit", "better", "says"}

    def test_it_needs_no_installation(self, session: SessionBuilder) -> None:
        session.usage((0, 1))
        arguments = ["check", session.folder, "--fail-if", "evictions>0"]
        first, second = run(PROFILEMATE, *arguments), run(["-m", "profilemate"], *arguments)
        assert (second.returncode, second.stdout) == (0, first.stdout)

    def test_help(self) -> None:
        shown = self.check("--help")[1]
        assert "Examples:" in shown
        assert "Exit codes:" in shown
        assert max(map(len, shown.splitlines())) <= 80


def test_tolerances() -> None:
    assert [share(text) for text in ("5%", "0.05", "0", "150 %", "1")] == [0.05, 0.05, 0, 1.5, 1]
    for wrong in ("", "five", "-5%", "5%%", "nan", "inf", "\uff15%"):
        with pytest.raises(typer.BadParameter, match="write 5% or"):
            share(wrong)
    with pytest.raises(typer.BadParameter, match="would be 500 %; write 5%"):
        share("5")


def test_every_key_is_documented(baseline: SessionBuilder, session: SessionBuilder) -> None:
    load(session, hits=9, evictions=100)
    session.metadata(model={**METADATA["model"], "name": "large"})
    checked = check.check(summary_of(session), ["hit_rate<1"], baseline=summary_of(baseline))
    found: Any = json.loads(json_renderer.render(checked))
    assert found["check_version"] == 1
    names = set(re.findall(r"`([\w.\[\]]+)`", DOCUMENTATION.read_text()))
    assert set(keys({**found, "session": 0, "baseline": 0})) - names == set()
