# SPDX-License-Identifier: Apache-2.0
"""Damage in well-formed CSV and JSON: numbers out of range, rows out of order."""

from __future__ import annotations

import gzip
import json
import os
import socket
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import binary, booleans, integers, sampled_from

from analysis import SessionError, open_session, summarize
from analysis.tables import facts
from analysis.tables.rules import RULES, Rule
from analysis.tables.schema import TABLES
from tests.analysis.builder import COLUMNS, METADATA, SessionBuilder, sound_row
from tests.analysis.impossible import IMPOSSIBLE, sound
from tests.analysis.invoke import invoke
from tests.analysis.test_session import error_of

USAGE = "kv_cache_usage.csv"
STEPS = "scheduler_steps.csv"
LOOKUPS = "prefix_cache_lookups.csv"


def step(time: float, engine: int = 0) -> dict[str, Any]:
    """A step of 50 us after which one request runs and one waits."""
    return {
        "timestamp_sec": time,
        "running_reqs": 1,
        "waiting_reqs": 1,
        "scheduled_tokens": 1,
        "scheduled_reqs": 1,
        "schedule_us": 50,
        "engine": engine,
    }


class TestNumbers:
    @pytest.mark.parametrize("complete", [True, False])
    @pytest.mark.parametrize(
        ("table", "column", "value", "says"),
        [
            (USAGE, "usage_pct", "nan", "not a number"),
            (USAGE, "timestamp_sec", "inf", "which is out of range"),
            ("kv_cache_allocations.csv", "timestamp_sec", "-1", "which is out of range"),
            ("kv_cache_allocations.csv", "num_blocks", str(2**31), "which is out of range"),
            ("kv_cache_evictions.csv", "lifetime_sec", "-inf", "which is out of range"),
            ("kv_cache_evictions.csv", "idle_sec", "1e300", "which is out of range"),
            ("prefix_cache_lookups.csv", "hit_tokens", str(2**62), "which is out of range"),
            ("prefix_cache_lookups.csv", "timestamp_sec", "NaN", "not a number"),
            (STEPS, "schedule_us", "nan", "not a number"),
            (STEPS, "repeats", "-5", "which is out of range"),
        ],
    )
    def test_in_a_csv_table(
        self,
        session: SessionBuilder,
        complete: bool,
        table: str,
        column: str,
        value: str,
        says: str,
    ) -> None:
        session.metadata(complete=complete)
        columns, good = COLUMNS[table].split(","), sound_row(table)
        bad = [value if name == column else cell for name, cell in zip(columns, good, strict=True)]
        lines = [COLUMNS[table], *(",".join(row) for row in (good, bad, good))]
        (session.folder / table).write_text("\n".join(lines) + "\n")
        assert f"{table}, line 3: {column} is {value!r}, {says}" in error_of(session)

    @pytest.mark.parametrize(
        ("row", "says"),
        [
            ('"timestamp": 1e18', "timestamp is '1e+18', which is out of range"),
            ('"timestamp": ' + "9" * 20, "timestamp is '99999999999999999999', which is out of"),
            ('"timestamp": -1', "timestamp is '-1', which is out of range"),
            ('"timestamp": NaN', "not JSON (NaN is no number)"),
            ('"queue_sec": 1e999', "queue_sec is 'Infinity', which is out of range"),
            ('"input_length": 4294967296', "input_length is '4294967296', which is out of range"),
            ('"hash_ids": [1, 9223372036854775808]', "hash_ids is '[1, 9223372036854775808]'"),
            ('"hash_ids": ' + "[" * 100_000, "not JSON"),
        ],
    )
    def test_in_a_request(self, session: SessionBuilder, row: str, says: str) -> None:
        session.requests({"request_id": "a"})
        session.append("requests.jsonl", "{" + row + "}\n")
        session.requests({"request_id": "b"})
        assert f"requests.jsonl, line 2: {says}" in error_of(session)

    def test_numbers_that_are_only_names_may_be_any(self, session: SessionBuilder) -> None:
        session.requests({"tenant": 2**53, "priority": -(2**53), "hash_ids": [2**62]})
        session.evictions({"content_id": 2**62})
        assert summarize(open_session(session.folder)).requests.ended == 1


class TestOrder:
    @pytest.mark.usefixtures("small_chunks")
    def test_states_of_a_pool(self, session: SessionBuilder) -> None:
        session.usage((1, 10), (3, 20), (4, 30), (2, 40))
        assert (
            f"{USAGE}, line 5: timestamp_sec is 2.000000, but an earlier row of the engine and "
            "pool has 4.000000"
        ) in error_of(session)

    @pytest.mark.usefixtures("small_chunks")
    def test_steps_of_an_engine(self, session: SessionBuilder) -> None:
        session.rows(STEPS, *(step(time) for time in (1, 3, 4, 2, 5)))
        assert (
            f"{STEPS}, line 5: timestamp_sec is 2.000000, but an earlier row of the engine has "
            "4.000000"
        ) in error_of(session)

    @pytest.mark.usefixtures("small_chunks")
    @pytest.mark.parametrize(
        "table", ["kv_cache_evictions.csv", "kv_cache_allocations.csv", LOOKUPS]
    )
    def test_rows_of_an_engine(self, session: SessionBuilder, table: str) -> None:
        row = {"event": "cache", "num_blocks": 1, "query_tokens": 9, "hit_tokens": 0}
        known = {name: value for name, value in row.items() if name in COLUMNS[table].split(",")}
        session.rows(table, *({**known, "timestamp_sec": time} for time in (1, 3, 4, 2, 5)))
        assert (
            f"{table}, line 5: timestamp_sec is 2.000000, but an earlier row of the engine has "
            "4.000000"
        ) in error_of(session)

    @pytest.mark.usefixtures("small_chunks")
    def test_lookups_that_are_written_later_than_they_began(self, session: SessionBuilder) -> None:
        """Refused ones are written when they end, those after a preemption when the step's others
        have been, those of a KV connector when its transfer ends."""
        first = {"query_tokens": 9, "hit_tokens": 0, "timestamp_sec": 4}
        session.lookups(
            first,
            {**first, "timestamp_sec": 1, "admitted": 0},
            {**first, "timestamp_sec": 2, "kind": "resumed"},
            {**first, "timestamp_sec": 3, "engine": 1},
        )
        assert summarize(open_session(session.folder)).prefix_cache.resumed.lookups == 1
        session.lookups({**first, "timestamp_sec": 3, "kind": "retry"})
        assert f"{LOOKUPS}, line 6: timestamp_sec is 3.000000" in error_of(session)
        session.metadata(scheduler={"connector": "NixlConnector"})
        assert summarize(open_session(session.folder)).prefix_cache.resumed.lookups == 1

    @pytest.mark.usefixtures("small_chunks")
    def test_engines_may_follow_each_other_in_any_way(self, session: SessionBuilder) -> None:
        session.usage((2, 10), (4, 20))
        session.usage((1, 30), (3, 40), engine=1)
        session.rows(STEPS, step(2), step(4), step(1, 1), step(3, 1), step(5))
        summary = summarize(open_session(session.folder))
        # Until the session's end at 10 s: from 2 s on, and from 1 s on.
        assert [pool.observed_sec for pool in summary.usage.pools] == [8, 9]
        assert summary.waiting.request_sec == 17

    def test_a_step_that_says_it_began_before_the_one_before(self, session: SessionBuilder) -> None:
        session.rows(STEPS, step(2), {**step(4), "schedule_us": 3_500_000}, step(5))
        lookups = ({"timestamp_sec": t, "request_id": "a", "admitted": 0} for t in (1.9, 3.9))
        session.lookups(*({**row, "query_tokens": 9, "hit_tokens": 0} for row in lookups))
        assert summarize(open_session(session.folder)).waiting.request_sec == 8


class TestMetadata:
    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ('{"format_version": 1, "ended_at": Infinity}', "not JSON (Infinity is no number)"),
            ('{"format_version": 1, "x": NaN}', "not JSON (NaN is no number)"),
            ("[" * 100_000, "not JSON (nested too deeply)"),
            ('{"x": ' + "9" * 5_000 + "}", "not JSON (Exceeds the limit (4300"),
        ],
    )
    def test_what_is_no_json(self, session: SessionBuilder, text: str, says: str) -> None:
        (session.folder / "metadata.json").write_text(text)
        assert f"metadata.json: {says}" in error_of(session)

    @pytest.mark.parametrize("moment", [10**30, 1e300, -(10**30), "9999-12-31T23:59:59Z"])
    def test_an_end_out_of_any_sense_is_not_known(
        self, session: SessionBuilder, moment: Any
    ) -> None:
        session.metadata(ended_at=moment)
        session.usage((1, 40), (3, 80))
        # The last row's time.
        assert summarize(open_session(session.folder)).session.duration_sec == 3

    def test_a_begin_out_of_any_sense_is_not_known(self, session: SessionBuilder) -> None:
        session.metadata(started_at=-1)
        session.usage((1, 40), (3, 80))
        assert summarize(open_session(session.folder)).session.duration_sec == 3

    @pytest.mark.parametrize("number", [10**30, -1, 1e300])
    def test_facts_out_of_any_sense_are_not_known(
        self, session: SessionBuilder, number: float
    ) -> None:
        session.metadata(
            scheduler={"watermark": number, "max_num_seqs": number},
            cache={"blocks": number, "max_concurrency": number},
            groups=[{"kind": "FullAttentionSpec", "block_size": number}],
            processes=[{"role": "engine", "rank": number}],
            prefix_lengths=[number],
        )
        session.usage((1, 40), (3, 80))
        facts = summarize(open_session(session.folder)).facts
        assert (facts.scheduler.watermark, facts.scheduler.max_num_seqs) == (None, None)
        assert (facts.pool_blocks, facts.max_concurrency) == (None, None)
        assert facts.groups[0].block_size is None
        assert facts.engines == ()

    def test_blocks_of_no_tokens(self, session: SessionBuilder) -> None:
        session.metadata(groups=[{"kind": "FullAttentionSpec", "block_size": 0}])
        session.usage((1, 40))
        session.requests({"request_id": "a", "input_length": 9})
        summary = summarize(open_session(session.folder))
        assert summary.facts.groups[0].block_size is None


def test_a_report_of_prompts_without_a_token(session: SessionBuilder, tmp_path: Path) -> None:
    session.metadata(prefix_lengths=[16, 32])
    session.usage((1, 40))
    session.requests(
        *(
            {"request_id": name, "input_length": 0, "prefix_ids": [1, last], "finish_sec": 2}
            for name, last in (("a", 2), ("b", 3), ("c", 4))
        )
    )
    page = tmp_path / "report.html"
    result = invoke("report", session.folder, "-o", page)
    assert result.returncode == 0, result.stderr
    assert "2 of 3 prompts begin as an earlier one does, with n/a of all" in page.read_text()


def _changes() -> list[tuple[str, int]]:
    return [(table, number) for table, all_ in IMPOSSIBLE.items() for number in range(len(all_))]


def _write(session: SessionBuilder, table: str, *rows: dict[str, Any]) -> None:
    if table in COLUMNS:
        (session.folder / table).unlink(missing_ok=True)
        session.rows(table, *rows)
    else:
        (session.folder / table).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _later(row: dict[str, Any], number: int) -> dict[str, Any]:
    """The row once more, as it may follow."""
    return {**row, "step": number} if "step" in row else row


class TestRules:
    @pytest.mark.parametrize(("table", "number"), _changes())
    def test_an_impossible_row_is_named(
        self, session: SessionBuilder, table: str, number: int
    ) -> None:
        """Among others, and where it is the only one."""
        row = sound(table)
        rows = [_later(row, number) for number in (1, 2, 3)]
        _write(session, table, *rows)
        summarize(open_session(session.folder))
        impossible = IMPOSSIBLE[table][number]
        head = 1 if table in COLUMNS else 0
        _write(session, table, rows[0], rows[1] | impossible(rows[1]), rows[2])
        assert f"{table}, line {head + 2}: " in error_of(session)
        _write(session, table, rows[0] | impossible(rows[0]))
        assert f"{table}, line {head + 1}: " in error_of(session)

    @pytest.mark.parametrize(
        ("table", "rule"), [(name, rule) for name, rules in RULES.items() for rule in rules]
    )
    def test_every_rule_can_be_broken(self, table: str, rule: Rule) -> None:
        file = TABLES[table].file
        row = sound(file)
        broken = [row | change(row) for change in IMPOSSIBLE[file]]
        schema = {name: TABLES[table].columns[name] for name in rule.columns}
        cells = [{name: one[name] for name in rule.columns} for one in (row, *broken)]
        frame = pl.DataFrame(cells, strict=False, infer_schema_length=None).cast(schema)
        first, *others = frame.select(rule.holds).to_series()
        assert first is True
        assert False in others

    @pytest.mark.usefixtures("small_chunks")
    def test_a_step_twice(self, session: SessionBuilder) -> None:
        session.rows(STEPS, *({**step(at), "step": at} for at in (1, 2)))
        session.rows(STEPS, *({**step(at, 1), "step": at} for at in (1, 2)))
        assert summarize(open_session(session.folder)).scheduling is not None
        session.rows(STEPS, {**step(2), "step": 2})
        says = f"{STEPS}, line 6: step is 2, but the row of the engine before it has 2"
        assert says in error_of(session)

    def test_the_first_of_many_rows_is_named(self, session: SessionBuilder) -> None:
        """More rows than are looked at together."""
        lookup = {"query_tokens": 9, "hit_tokens": 0, "request_id": "a" * 400}
        rows = [
            lookup | {"hit_tokens": 10 * (number in (15_000, 15_002))} for number in range(15_100)
        ]
        session.lookups(*rows)
        text = error_of(session)
        assert (
            f"{LOOKUPS}, line 15002: more tokens were found than asked for: hit_tokens is '10', "
            "query_tokens is '9'; repair or remove that line"
        ) in text

    def test_nothing_is_checked_of_an_impossible_session(self, session: SessionBuilder) -> None:
        session.usage((1, 40))
        session.lookups({"query_tokens": 9, "hit_tokens": 10})
        result = invoke("check", session.folder, "--fail-if", "usage_mean>99%")
        assert (result.returncode, result.stdout) == (2, "")
        assert len(result.stderr.splitlines()) == 1


class TestFiles:
    @pytest.mark.parametrize("complete", [True, False])
    @pytest.mark.parametrize("ended", [True, False])
    @pytest.mark.parametrize("table", [USAGE, "requests.jsonl"])
    def test_a_line_without_end(
        self, session: SessionBuilder, complete: bool, ended: bool, table: str
    ) -> None:
        """It is found without reading it: the file has a hole of 20 GB."""
        session.metadata(complete=complete)
        _write(session, table, sound(table))
        with open(session.folder / table, "r+b") as file:
            file.seek(0, 2)
            file.truncate(file.tell() + 20 * 10**9)
            if ended:
                file.seek(0, 2)
                file.write(b"\n")
        line = 3 if table in COLUMNS else 2
        assert f"{table}, line {line}: longer than" in error_of(session)

    def test_a_line_that_is_sound_but_for_its_length(self, session: SessionBuilder) -> None:
        lookup = {"query_tokens": 9, "hit_tokens": 0}
        session.lookups(lookup, lookup | {"request_id": "a" * 100_000}, lookup)
        summarize(open_session(session.folder))
        too_long = "a" * TABLES["prefix_cache_lookups"].longest_line
        session.lookups(lookup | {"request_id": too_long}, lookup)
        assert f"{LOOKUPS}, line 5: longer than 1 MiB" in error_of(session)

    def test_a_sound_line_with_a_long_text_is_not_the_one_that_is_named(
        self, session: SessionBuilder
    ) -> None:
        lookup = {"query_tokens": 9, "hit_tokens": 0}
        session.lookups(lookup | {"request_id": "a" * 300_000}, lookup | {"hit_tokens": 10})
        assert f"{LOOKUPS}, line 3: more tokens were found" in error_of(session)

    def test_a_header_without_end(self, session: SessionBuilder) -> None:
        (session.folder / USAGE).write_text(COLUMNS[USAGE] + ",more" * 50_000)
        assert f"{USAGE}, line 1: it is not a table" in error_of(session)

    @pytest.mark.parametrize("name", [USAGE, "requests.jsonl", "metadata.json"])
    @pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "device", "loop"])
    def test_what_is_no_plain_file(
        self, session: SessionBuilder, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
    ) -> None:
        session.rows(LOOKUPS, {"query_tokens": 9, "hit_tokens": 0})
        (session.folder / name).unlink(missing_ok=True)
        monkeypatch.chdir(session.folder)
        make = {
            "folder": lambda: os.mkdir(name),
            "pipe": lambda: os.mkfifo(name),
            "socket": lambda: socket.socket(socket.AF_UNIX).bind(name),
            "device": lambda: os.symlink("/dev/zero", name),
            "loop": lambda: os.symlink(name, name),
        }
        make[kind]()
        assert f"cannot read {session.folder / name}: " in error_of(session)

    def test_metadata_that_is_too_large(self, session: SessionBuilder) -> None:
        with open(session.folder / "metadata.json", "wb") as file:
            file.truncate(10**12)
        assert "metadata.json: larger than 16 MiB" in error_of(session)


class TestNumbersThatDriveLoops:
    @pytest.mark.parametrize("value", [10**12, 10**30, -1, 1.5, "9", True, [1]])
    def test_in_metadata_are_not_known(self, session: SessionBuilder, value: Any) -> None:
        metadata: dict[str, Any] = {}
        for name in facts.COUNTS:
            *sections, key = name.split(".")
            place = metadata
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = value
        session.metadata(**metadata, groups=[{"kind": "FullAttentionSpec", "block_size": value}])
        session.usage((1, 40))
        warnings = summarize(open_session(session.folder)).warnings
        said = [name for name in facts.COUNTS if any(f" {name} is " in line for line in warnings)]
        allowed = {name for name, most in facts.COUNTS.items() if value == 10**12 <= most}
        assert {*facts.COUNTS} - {*said} == allowed
        assert any("block_size of group 0 is " in line for line in warnings)

    def test_requests_of_more_blocks_than_fit_into_memory(self, session: SessionBuilder) -> None:
        known = {**sound("requests.jsonl"), "block_size": 1, "hash_ids": [1, 2, 3]}
        session.requests({**known, "input_length": 10**8})
        for arguments in (("--fast",), ("--blocks", "0.5x")):
            result = invoke("whatif", session.folder, *arguments)
            assert result.returncode == 2
            assert "99,999,997 blocks whose contents are not recorded" in result.stderr

    def test_a_pool_that_cannot_be_simulated(self, session: SessionBuilder) -> None:
        session.metadata(cache={**METADATA["cache"], "blocks": 10**9})
        session.requests(sound("requests.jsonl"))
        result = invoke("whatif", session.folder)
        assert "a pool of 999,999,999 blocks, and at most 4,000,000" in result.stderr
        session.metadata()
        result = invoke("whatif", session.folder, "--blocks", "1000000000")
        assert "has 999,999,999 blocks, and at most 4,000,000" in result.stderr

    def test_a_request_that_cannot_be_simulated(self, session: SessionBuilder) -> None:
        session.requests({**sound("requests.jsonl"), "input_length": 5 * 10**7})
        result = invoke("whatif", session.folder)
        assert "a request has 50,000,010 tokens" in result.stderr

    def test_a_model_of_too_many_layers(self, session: SessionBuilder) -> None:
        model = {"layers": 10_000, "kv_heads": 1, "head_size": 64, "dtype": "float16"}
        session.metadata(model=model, parallel={"pipeline": 10_000})
        result = invoke("plan", "--session", session.folder, "--without-vllm")
        assert "10,000 layers in each of 10,000 pipeline stages" in result.stderr


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    at=integers(0, 100), bytes_=binary(max_size=4), cut=booleans(), table=sampled_from([*TABLES])
)
def test_any_bytes_in_a_table_are_read_or_named(
    tmp_path_factory: pytest.TempPathFactory, at: int, bytes_: bytes, cut: bool, table: str
) -> None:
    session = SessionBuilder(tmp_path_factory.mktemp("any"))
    file = TABLES[table].file
    _write(session, file, *(_later(sound(file), number) for number in (1, 2, 3)))
    path = session.folder / file
    content = path.read_bytes()
    place = len(content) * at // 100
    path.write_bytes(content[:place] + bytes_ + (b"" if cut else content[place:]))
    opened, said = open_session(session.folder), ""
    try:
        for _ in opened.batches(table, list(TABLES[table].columns)):
            pass
    except SessionError as error:
        said = str(error)
    assert not said or (file in said and "\n" not in said)


def test_a_packed_trace_that_would_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("analysis.whatif.trace._MOST_BYTES", 1000)
    trace = tmp_path / "trace.jsonl.gz"
    trace.write_bytes(gzip.compress(b" " * 10**6))
    result = invoke("whatif", trace, "--fast")
    assert result.returncode == 2
    assert "unpacks to more than 1,000 bytes" in result.stderr
