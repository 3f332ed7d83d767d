# SPDX-License-Identifier: Apache-2.0
"""Which combinations are tried, and what their commands look like."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.errors import RuleError
from profilemate.sweep import settings

RUN = Path("/runs/001-1")


def test_each_value_meets_each_other() -> None:
    assert settings.combinations(["a=1,2", "b=x,y"], None) == (
        {"a": "1", "b": "x"},
        {"a": "1", "b": "y"},
        {"a": "2", "b": "x"},
        {"a": "2", "b": "y"},
    )


def test_a_list_has_its_combinations_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text(
        "# what was asked for\n"
        "max-num-seqs=4 block-size=16\n"
        "\n"
        "--block-size=32 --max-num-seqs=8  # the same flags, otherwise written\n"
        """max-num-seqs=8 block-size='1 6,{"a": 1}'\n"""
    )
    assert settings.combinations([], path) == (
        {"max-num-seqs": "4", "block-size": "16"},
        {"block-size": "32", "max-num-seqs": "8"},
        {"max-num-seqs": "8", "block-size": '1 6,{"a": 1}'},
    )


def test_commas_within_brackets_and_quotes_part_no_values() -> None:
    assert settings.values_of("c={'a': [1, 2], 'b': 3},(4,5),,\"x,y\"") == (
        "c",
        ("{'a': [1, 2], 'b': 3}", "(4,5)", "", '"x,y"'),
    )


def test_settings_are_appended_as_flags() -> None:
    combination = {"n": "4", "yes": "true", "no": "false", "left-out": ""}
    assert settings.command(["vllm", "bench"], combination, RUN) == [
        *("vllm", "bench", "--n", "4", "--yes", "--no-no"),
    ]


def test_placeholders_are_filled_and_all_else_stays() -> None:
    template = ["env", "THREADS={threads}", "x", "{run}/{threads}.json", '{"mode":3}', "{other}"]
    # A value that looks like a placeholder is none.
    assert settings.command(template, {"threads": "{run}", "n": "2"}, RUN) == [
        *("env", "THREADS={run}", "x", "/runs/001-1/{run}.json", '{"mode":3}', "{other}"),
        *("--n", "2"),
    ]


@pytest.mark.parametrize("word", ["--max-num-seqs", "--max_num_seqs=4"])
def test_a_flag_that_is_there_already_is_refused(word: str) -> None:
    with pytest.raises(RuleError, match=r"has --max.num.seqs already; .* \{max-num-seqs\}"):
        settings.check_command(["vllm", word], {"max-num-seqs": "8"})
    settings.check_command(["vllm", f"{word}={{max-num-seqs}}"], {"max-num-seqs": "8"})


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["max-num-seqs"], "has no '='"),
        (["a=1", "a=2"], "a is set twice"),
        (["a=1,1"], "a value twice"),
        (["9a=1"], "not the name of a flag"),
        (["run=1"], "not the name of a flag"),
        ([f"a={','.join(map(str, range(200)))}", f"b={','.join(map(str, range(51)))}"], "10,000"),
    ],
)
def test_what_makes_no_sense_is_refused(sets: list[str], said: str) -> None:
    with pytest.raises(RuleError, match=said):
        settings.combinations(sets, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a=1\nb=2\n", "line 2: it sets b, and the first combination a"),
        ("a=1\na\n", "line 2: 'a' has no '='"),
        ("a='1\n", "line 1: No closing quotation"),
        ("a=1 a=2\n", "line 1: a is set twice"),
        ("a=1\na=1\n", "a=1 is there twice"),
        ("# nothing\n", "has no combination"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text(text)
    with pytest.raises(RuleError, match=said):
        settings.combinations([], path)


def test_a_list_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"cannot read .*: No such file"):
        settings.combinations([], tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(RuleError, match="not UTF-8"):
        settings.combinations([], tmp_path / "bytes")
    with pytest.raises(RuleError, match="not both"):
        settings.combinations(["a=1"], tmp_path / "none")
