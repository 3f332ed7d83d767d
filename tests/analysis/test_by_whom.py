# SPDX-License-Identifier: Apache-2.0
"""By whom: keys, labels, measures of one key, and the command line, on sessions by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import analysis
from analysis import RuleError, SessionError, Summary, open_session
from analysis.judgement import check, measures
from analysis.renderers.html.charts import by_whom as charts
from analysis.renderers.html.report import Report
from analysis.renderers.text import compare as compared
from analysis.renderers.text import summary as text
from analysis.requests import askers, by_whom
from analysis.tables import labels
from profilemate.commands.shared import values
from tests.analysis.builder import SessionBuilder
from tests.analysis.invoke import invoke

TENANT = 77


def asked(
    session: SessionBuilder,
    request_id: str,
    at: float,
    hash_ids: list[int],
    *,
    hit_tokens: int = 0,
    **fields: Any,
) -> None:
    """A request of one step, admitted at once, with a first token a quarter of a second later."""
    length = 16 * len(hash_ids)
    session.lookups(
        {
            "timestamp_sec": at,
            "request_id": request_id,
            "query_tokens": length + 1,
            "hit_tokens": hit_tokens,
        }
    )
    session.requests(
        {
            "timestamp": at * 1e3,
            "request_id": request_id,
            "input_length": length + 1,
            "output_length": 1,
            "hash_ids": [*hash_ids, 10_000 + round(at * 10)],
            "output_hash_ids": [],
            "block_size": 16,
            "computed_tokens": length + 1,
            "queue_sec": 0.125,
            "first_token_sec": at + 0.25,
            "finish_sec": at + 0.25,
            "preemptions": 0,
            **fields,
        }
    )


def two_adapters(session: SessionBuilder) -> None:
    """german asks twice for two blocks, french once; one request has no adapter."""
    asked(session, "1", 1, [1, 2], lora="german", bare_hash_ids=[5, 6])
    asked(session, "2", 2, [1, 2], lora="german", bare_hash_ids=[5, 6], hit_tokens=32)
    asked(session, "3", 3, [3, 4], lora="french", bare_hash_ids=[5, 7])
    asked(session, "4", 4, [8], bare_hash_ids=[])


def summary_of(session: SessionBuilder, rules: Path | None = None) -> Summary:
    return analysis.summarize(open_session(session.folder, label_rules=rules))


def measured(session: SessionBuilder, name: str) -> float | None:
    return measures.by_name(name).of(summary_of(session))


class TestKeys:
    def test_the_command_line_knows_every_kind_of_key(self) -> None:
        assert values.KEYS == askers.EVERY

    def test_each_adapter_has_its_own_figures(self, session: SessionBuilder) -> None:
        two_adapters(session)
        found = summary_of(session)
        split = found.by_whom.split("lora")
        assert split is not None
        assert [
            (share.key, share.requests, share.query_tokens, share.hit_tokens)
            for share in split.shares
        ] == [("german", 2, 66, 32), ("french", 1, 33, 0), (None, 1, 17, 0)]
        assert [share.known_elsewhere_tokens for share in split.shares] == [0, 16, 0]
        assert split.shares[0].first_token_p95_sec == pytest.approx(0.25)
        assert (split.keys, split.rest, split.not_known) == (3, None, None)

    def test_beyond_the_most_keys_all_are_one(
        self, session: SessionBuilder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No request is lost, and a quantile of the rest is one of its requests."""
        monkeypatch.setattr(by_whom, "MOST", 1)
        two_adapters(session)
        split = summary_of(session).by_whom.split("lora")
        assert split is not None
        assert [share.key for share in split.shares] == ["german", None]
        assert split.rest is not None
        assert (split.rest.requests, split.rest.query_tokens, split.keys) == (1, 33, 3)
        assert split.rest.first_token_p50_sec == pytest.approx(0.25)

    def test_of_an_earlier_release_what_it_did_not_record_is_not_known(
        self, session: SessionBuilder
    ) -> None:
        """No bare ids and no API servers."""
        asked(session, "1", 1, [1], tenant=TENANT)
        asked(session, "2", 2, [2])
        found = summary_of(session)
        assert found.by_whom.known_elsewhere_tokens is None
        by_salt, by_server = found.by_whom.split("salt"), found.by_whom.split("api-server")
        assert by_salt is not None
        assert by_server is not None
        assert [share.known_elsewhere_tokens for share in by_salt.shares] == [None, None]
        assert {share.key for share in by_salt.shares} == {str(TENANT), None}
        assert by_server.shares == ()
        assert by_server.not_known is not None
        assert by_server.not_known.requests == 2
        said = invoke("summary", session.folder, "--by", "salt").stdout
        assert "n/a" in said

    def test_without_salts_and_adapters_all_is_known(self, session: SessionBuilder) -> None:
        asked(session, "1", 1, [1])
        assert summary_of(session).by_whom.known_elsewhere_tokens == 0

    def test_one_key_of_each_kind_needs_no_section(self, session: SessionBuilder) -> None:
        asked(session, "1", 1, [1], api_server=0, priority=0)
        found = summary_of(session)
        assert "By whom" not in text.render(found)
        assert list(charts.charts(Report(found, None))) == []  # type: ignore[arg-type]

    def test_the_report_has_a_chart_for_each_kind_with_several(
        self, session: SessionBuilder
    ) -> None:
        two_adapters(session)
        (chart,) = charts.charts(Report(summary_of(session), None))  # type: ignore[arg-type]
        assert chart.key == "by-lora"
        assert chart.table is not None
        assert [row[:6] for row in chart.table.rows] == [
            ("german", "2", "66", "32", "32", "0"),
            ("french", "1", "33", "0", "32", "16"),
            ("no adapter", "1", "17", "0", "16", "0"),
        ]


class TestCalls:
    def test_answers_of_one_call_have_its_id_and_its_prompt(self, session: SessionBuilder) -> None:
        """Two calls of two; one request whose id is like it, and two with other prompts."""
        ids = ("0_a", "1_a", "0_b-1", "1_b-1", "0_c")
        for number, request_id in enumerate(ids):
            asked(session, request_id, 1 + number, [number])
        asked(session, "0_d", 7, [50])
        asked(session, "1_d", 8, [51, 52])
        fan_out = summary_of(session).by_whom.fan_out
        assert (fan_out.calls, fan_out.requests, fan_out.most) == (2, 4, 2)

    def test_beams_of_one_search_have_its_id(self, session: SessionBuilder) -> None:
        steps = ("0" * 32, "a" * 32)
        for number, step in enumerate(steps):
            for beam in range(2):
                request_id = f"cmpl-7-{step}-beam-{beam}-0123abcd"
                asked(session, request_id, 1 + number + beam / 2, [number])
        fan_out = summary_of(session).by_whom.fan_out
        assert (fan_out.beam_calls, fan_out.beam_requests, fan_out.calls) == (1, 4, 0)
        said = text.render(summary_of(session))
        assert "1 call  of 4 requests" in said


class TestLabels:
    def test_rules_are_read_in_their_order(self, tmp_path: Path) -> None:
        path = tmp_path / "rules"
        path.write_text("# names\n\n chat = ^a=b \nrest=.\n")
        rules = labels.read(path)
        assert [(rule.name, rule.pattern.pattern) for rule in rules] == [
            ("chat", "^a=b"),
            ("rest", "."),
        ]

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ("", "has no rule"),
            ("# nothing\n", "has no rule"),
            ("chat\n", "line 1: 'chat' is no rule"),
            ("a = .\nchat =\n", "line 2: 'chat =' is no rule"),
            ("= .\n", "line 1: '= .' is no rule"),
            ("a,b = .\n", "the name without a comma or a brace"),
            ("a = [\n", "line 1: '[' is no regular expression: unterminated character set"),
            (b"\xff", "is no text in UTF-8"),
            ("x" * (1 << 20) + "=", "has more than 1 MiB"),
        ],
    )
    def test_a_bad_file_is_one_line(
        self, session: SessionBuilder, tmp_path: Path, content: str | bytes, says: str
    ) -> None:
        path = tmp_path / "rules"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(SessionError, match="rules") as raised:
            open_session(session.folder, label_rules=path)
        assert says in str(raised.value)
        done = invoke("summary", session.folder, "--by", "label", "--labels", path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)

    def test_a_file_that_is_not_there_is_one_line(self, session: SessionBuilder) -> None:
        done = invoke("summary", session.folder, "--labels", "nowhere")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "nowhere" in done.stderr


class TestMeasures:
    def test_a_measure_of_one_key(self, session: SessionBuilder) -> None:
        two_adapters(session)
        assert measured(session, "hit_rate{lora=german}") == pytest.approx(32 / 66)
        assert measured(session, "hit_rate{lora=}") == 0
        assert measured(session, "requests{lora=german}") == 2
        assert measured(session, "queue_p95{lora=french}") == pytest.approx(0.125)
        assert measured(session, "hit_rate{lora=dutch}") is None
        assert measured(session, "hit_rate{label=chat}") is None

    def test_every_one_has_a_value_of_every_key(self, session: SessionBuilder) -> None:
        two_adapters(session)
        asked(session, "5", 5, [9], draft_tokens=8, accepted_tokens=2)
        found = summary_of(session)
        assert found.requests.acceptance == 0.25
        for name in measures.OF_KEY:
            measure = measures.by_name(f"{name}{{engine=0}}")
            assert measure.of(found) == measures.by_name(name).of(found)
            assert measure.better == measures.by_name(name).better

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("hit_rat{lora=x}", "perhaps hit_rate"),
            ("steps{lora=x}", "there is no steps of one key"),
            ("hit_rate{tenant=x}", "'tenant' is no kind of key"),
            ("hit_rate{lora}", "there is no measure"),
        ],
    )
    def test_what_is_none(self, name: str, says: str) -> None:
        with pytest.raises(RuleError, match=says):
            measures.by_name(name)

    def test_check_takes_one(self, session: SessionBuilder) -> None:
        two_adapters(session)
        found = summary_of(session)
        checked = check.check(
            found, ["hit_rate{lora=german}<40%", "hit_rate{lora=french}<0.4", "requests{lora=x}<1"]
        )
        assert [result.failed for result in checked.results] == [False, True, True]
        session.rows("scheduler_steps.csv", {"scheduled_tokens": 1, "scheduled_reqs": 1})
        done = invoke("check", session.folder, "--fail-if", "hit_rate{lora=french}<40%")
        assert done.returncode == 1
        assert "hit_rate{lora=french}" in done.stdout

    def test_compare_lists_the_largest_keys_and_no_salts(
        self, session: SessionBuilder, tmp_path: Path
    ) -> None:
        other = SessionBuilder(tmp_path / "other")
        for each in (session, other):
            two_adapters(each)
        asked(session, "5", 5, [20], tenant=TENANT)
        found = analysis.compare(open_session(session.folder), open_session(other.folder))
        rows = {row.name: row for row in found.measures if "{" in row.name}
        assert list(rows)[:4] == [
            "hit_rate{lora=german}",
            "recomputed_tokens{lora=german}",
            "queue_p95{lora=german}",
            "first_token_p95{lora=german}",
        ]
        assert {name.split("{")[1] for name in rows} == {"lora=german}", "lora=french}", "lora=}"}
        assert "hit_rate{lora=german}" in compared.render(found)


class TestCommand:
    def test_json_has_the_split(self, session: SessionBuilder) -> None:
        two_adapters(session)
        done = invoke("summary", session.folder, "--by", "lora", "--json")
        found = json.loads(done.stdout)
        assert (found["split_version"], found["by"], found["keys"]) == (1, "lora", 3)
        assert found["shares"][0]["missed_by_reason"] == {"compulsory": 32}

    def test_text_has_every_key(self, session: SessionBuilder) -> None:
        two_adapters(session)
        said = invoke("summary", session.folder, "--by", "lora").stdout
        for name in ("german", "french", "no adapter"):
            assert said.count(f"\n  {name} ") == 4
        assert "16 prompt tokens" in said
        assert all(len(line) <= 80 for line in said.splitlines()[2:])

    def test_the_screen_has_the_hit_rates_of_the_largest(self, session: SessionBuilder) -> None:
        two_adapters(session)
        said = invoke("summary", session.folder, "--no-replay").stdout
        assert (
            "\n  By adapter          hit rate german 48.48 %, french 0.00 %, no adapter 0.00 %\n"
        ) in said

    def test_a_line_of_the_screen_stays_one(self, session: SessionBuilder) -> None:
        for number in range(9):
            asked(session, str(number), 1 + number, [number], lora=f"{number} {'x' * 90}")
        lines = invoke("summary", session.folder, "--no-replay").stdout.splitlines()
        (line,) = (line for line in lines if "By adapter" in line)
        assert line.endswith(", 8 more")
        assert len(line) <= 80

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (("--by", "tenant"), "is no kind of key"),
            (("--by", "label"), "needs --labels FILE"),
            (("--by", "lora", "--all"), "leave out --all and --full"),
            (("--by", "lora", "--full"), "leave out --all and --full"),
            (("--by", "lora", "--by", "salt"), "--by lora --by salt: one kind of key at a time"),
        ],
    )
    def test_what_makes_no_sense_is_one_line(
        self, session: SessionBuilder, options: tuple[str, ...], says: str
    ) -> None:
        asked(session, "1", 1, [1])
        done = invoke("summary", session.folder, *options)
        assert (done.returncode, done.stdout) == (2, "")
        assert says in " ".join(done.stderr.split())
