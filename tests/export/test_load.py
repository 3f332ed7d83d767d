# SPDX-License-Identifier: Apache-2.0
"""The recorded load: as vLLM's own data sets read it, and what scaling it does."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from analysis.whatif import fast
from analysis.whatif.workload import read_workload
from tests.analysis import stories
from tests.analysis.builder import SessionBuilder
from tests.analysis.conftest import session as session
from tests.analysis.invoke import invoke
from tests.analysis.test_cli import assert_fails
from tests.support.engine import write_model

BLOCK = 16


def exported(session: SessionBuilder, *options: object) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines of the file, and what was printed before its path."""
    target = session.folder.parent / "load.jsonl"
    done = invoke("export", "load", session.folder, "-o", target, *options)
    assert done.returncode == 0, done.stderr
    *said, path = done.stdout.splitlines()
    assert path == str(target)
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    return lines, [*said, *done.stderr.splitlines()]


def shared(first: list[Any], second: list[Any]) -> int:
    """How many of their first entries are equal."""
    same = (one == other for one, other in zip(first, second, strict=False))
    return next((place for place, equal in enumerate(same) if not equal), len(first))


def bench_arguments(command: str) -> argparse.Namespace:
    """The command that was printed, as vLLM's own parser takes it."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = shlex.split(command)
    assert words[:3] == ["vllm", "bench", "serve"]
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return parser.parse_args(words[3:])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose tokens are bytes."""
    return write_model(tmp_path_factory.mktemp("model"))


def test_times_lengths_and_what_is_shared(session: SessionBuilder) -> None:
    stories.swept(session)
    lines, said = exported(session)
    assert [line["timestamp"] for line in lines] == [0, 1500, 2000, 4000, 7000]
    assert [line["input_length"] for line in lines] == [50, 50, 65, 70, 65]
    assert [line["output_length"] for line in lines] == [1] * 5
    ids = [line["hash_ids"] for line in lines]
    # A, A2 and the end of each; S has nothing in common; B and C have three and three.
    assert ids == [
        *([0, 1, 2, 3], [0, 1, 2, 4], [5, 6, 7, 8, 9], [0, 1, 2, 10, 11], [0, 1, 2, 12, 13])
    ]
    (command,) = said
    assert "--timed-trace-chunk-hash-size 16" in command
    assert "--num-prompts 5" in command


def test_vllms_timed_trace_makes_the_same_blocks(session: SessionBuilder, tokenizer: Path) -> None:
    from transformers import AutoTokenizer
    from vllm.benchmarks.datasets import get_samples

    stories.swept(session)
    lines, (command,) = exported(session)
    arguments = bench_arguments(command)
    samples = get_samples(arguments, AutoTokenizer.from_pretrained(tokenizer))
    assert [one.timestamp for one in samples] == [0, 1.5, 2, 4, 7]
    prompts = [one.prompt for one in samples]
    assert [len(prompt) for prompt in prompts] == [50, 50, 65, 70, 65]
    for one, prompt in zip(lines, prompts, strict=True):
        for other, second in zip(lines, prompts, strict=True):
            blocks = shared(one["hash_ids"], other["hash_ids"])
            if one is not other:
                assert shared(prompt, second) // BLOCK == blocks


@pytest.mark.parametrize("kind", ["bytes", "with a token before", "words", "words of their own"])
def test_vllms_custom_data_set_makes_the_same_blocks(
    session: SessionBuilder, tokenizer: Path, kind: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer
    from vllm.benchmarks.datasets import get_samples

    stories.swept(session)
    own = tmp_path / "tokenizer"
    own.mkdir()
    for file in tokenizer.glob("*.json"):
        (own / file.name).write_text(file.read_text())
    adapt(own / "tokenizer.json", kind)
    lines, (command,) = exported(session, "--format", "custom", "--tokenizer", own)
    tokens = AutoTokenizer.from_pretrained(own)
    arguments = bench_arguments(command)
    samples = get_samples(arguments, tokens)
    assert [one.prompt for one in samples] == [line["prompt"] for line in lines]
    assert [one.prompt_len for one in samples] == [50, 50, 65, 70, 65]
    assert [one.expected_output_len for one in samples] == [1] * 5
    spaces = {"words": (" ", True), "words of their own": ("", True)}.get(kind, ("", False))
    assert all(one.prompt.startswith(spaces[0]) for one in samples)
    assert [" " in one.prompt.strip() for one in samples] == [spaces[1]] * 5
    a, a2, s, b, c = (tokens(one.prompt).input_ids for one in samples)
    assert [shared(a, other) // BLOCK for other in (a2, s, b, c)] == [3, 0, 3, 3]
    assert shared(b, c) // BLOCK == 3


def adapt(file: Path, kind: str) -> None:
    """Make another kind of tokenizer of the one that is there."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing

    known = Tokenizer.from_file(str(file))
    text = ["sun moon star rain snow wind leaf stone river hill sea sand"] * 99
    if kind == "with a token before":
        first = known.id_to_token(0)
        known.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])
    elif kind == "words":
        known = Tokenizer(models.BPE())
        known.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        known.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        known.train_from_iterator(text, trainers.BpeTrainer(initial_alphabet=alphabet))
    elif kind == "words of their own":
        known = Tokenizer(models.BPE(unk_token="?"))
        known.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        known.decoder = decoders.Metaspace()
        # Without a pre-tokenizer, words would be learnt together with their neighbours.
        learner = Tokenizer(models.BPE(unk_token="?"))
        learner.pre_tokenizer = pre_tokenizers.Metaspace()
        learner.train_from_iterator(text, trainers.BpeTrainer(special_tokens=["?"]))
        learnt = json.loads(learner.to_str())["model"]
        content = json.loads(known.to_str()) | {"model": learnt}
        known = Tokenizer.from_str(json.dumps(content))
    known.save(str(file))


def test_a_simulation_of_the_load_finds_what_one_of_the_session_finds(
    session: SessionBuilder, tmp_path: Path
) -> None:
    stories.swept(session)
    exported(session)
    own, again = (
        fast.curve(read_workload(path)) for path in (session.folder, tmp_path / "load.jsonl")
    )
    assert own.ceiling.hit_rate == again.ceiling.hit_rate
    assert own.ceiling.query_tokens == again.ceiling.query_tokens


def test_faster(session: SessionBuilder) -> None:
    stories.swept(session)
    lines, _ = exported(session, "--scale", "2x")
    assert [line["timestamp"] for line in lines] == [0, 750, 1000, 2000, 3500]


def test_more_users_share_what_conversations_share(session: SessionBuilder) -> None:
    """A2 sends A's prompt again, which is another conversation: three blocks are shared by two. S's
    are nobody else's."""
    stories.swept(session)
    lines, _ = exported(session, "--users", "2x")
    assert len(lines) == 10
    # The gap between two requests is 1750 ms, so a copy comes 875 ms later.
    assert [line["timestamp"] for line in lines][:4] == [0, 875, 1500, 2000]
    by_time = {line["timestamp"]: line for line in lines}
    prompts = {name: by_time[at] for name, at in {"a": 0, "a'": 875, "s": 2000}.items()}
    copy = by_time[2875]
    assert shared(prompts["a"]["hash_ids"], prompts["a'"]["hash_ids"]) == 3
    assert shared(prompts["s"]["hash_ids"], copy["hash_ids"]) == 0
    assert copy["input_length"] == 65
    numbers = [number for line in lines for number in line["hash_ids"]]
    assert sorted(set(numbers)) == list(range(max(numbers) + 1))


def turns(session: SessionBuilder) -> None:
    """A conversation: the second prompt has the first one, its answer, and more."""
    _, first = stories.request("one", 1, 2, 32, [1, 2], 0)
    _, second = stories.request("two", 3, 4, 64, [1, 2, 3, 4], 48)
    first |= {"hash_ids": [1, 2], "output_hash_ids": [3], "output_length": 17}
    second |= {"hash_ids": [1, 2, 3, 4]}
    session.requests(first | {"computed_tokens": 48}, second)


def test_a_conversation_stays_one_with_more_users(session: SessionBuilder) -> None:
    turns(session)
    lines, said = exported(session, "--users", "2x")
    one, other, two, fourth = (line["hash_ids"] for line in lines)
    assert (shared(one, two), shared(other, fourth)) == (2, 2)
    assert not set(one) & set(other)
    assert (
        "profilemate: note: 16 tokens of prompts were answers before: the new answers are others, "
        "so these tokens are computed once more"
    ) in said


def test_mooncakes_blocks_are_larger(session: SessionBuilder) -> None:
    for number in range(2):
        _, row = stories.request(f"r{number}", 1 + number, 2 + number, 1040, [], 0)
        own = [1000 * (number + 1) + place for place in range(25)]
        session.requests(row | {"hash_ids": [*range(40), *own], "timestamp": 1000.4 * number})
    lines, said = exported(session, "--format", "mooncake")
    assert [len(line["hash_ids"]) for line in lines] == [3, 3]
    assert shared(*(line["hash_ids"] for line in lines)) == 1
    assert [line["timestamp"] for line in lines] == [0, 1000]
    note = "in blocks of 512 tokens, prompts share 512 tokens of the 640 that they share in the"
    assert said == [f"profilemate: note: {note} recorded blocks of 16"]


def test_engines_whose_ids_do_not_compare_share_nothing(session: SessionBuilder) -> None:
    _, row = stories.request("A", 1, 2, 50, [1, 2, 3], 0)
    session.requests(row, row | {"engine": 1, "request_id": "B", "hash_ids": [1, 2, 3, 999]})
    lines, _ = exported(session)
    assert not set(lines[0]["hash_ids"]) & set(lines[1]["hash_ids"])
    session.metadata(content_ids_shared=True)
    lines, _ = exported(session)
    assert shared(*(line["hash_ids"] for line in lines)) == 3


def test_who_never_ran_is_left_out_and_said(session: SessionBuilder) -> None:
    _, row = stories.request("A", 1, 2, 50, [1, 2, 3], 0)
    session.requests(
        row,
        row
        | {"request_id": "B", "finish_reason": "abort", "computed_tokens": 0, "output_length": 0},
    )
    lines, said = exported(session)
    assert len(lines) == 1
    assert "1 requests are left out, which went away before they were admitted" in said[-1]


def test_the_warm_up_is_left_out(session: SessionBuilder) -> None:
    stories.swept(session)
    lines, _ = exported(session, "--after", "2.9s")
    assert [line["timestamp"] for line in lines] == [0, 2000, 5000]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--format", "custom"), "--format custom and --tokenizer PATH need each other"),
        (("--tokenizer", "x"), "--format custom and --tokenizer PATH need each other"),
        (("--format", "custom", "--tokenizer", "nowhere"), "cannot read nowhere"),
        (
            ("--format", "custom", "--tokenizer", "x", "--scale", "2x"),
            "--format custom has no times",
        ),
        (("--tokens-per-id", "0"), "--tokens-per-id is at least 1"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    session: SessionBuilder, options: tuple[str, ...], says: str
) -> None:
    stories.swept(session)
    assert_fails(invoke("export", "load", session.folder, *options), says)
    assert not list(session.folder.glob("*load*"))


@pytest.mark.parametrize(
    "options",
    [("--scale", "0"), ("--scale", "-1"), ("--users", "1.5x"), ("--users", "0x"), ("--users", "8")],
)
def test_a_factor_that_is_none_is_refused(
    session: SessionBuilder, options: tuple[str, str]
) -> None:
    done = invoke("export", "load", session.folder, *options)
    assert done.returncode == 2
    assert options[0] in done.stderr


def test_a_session_without_a_request_has_no_load(session: SessionBuilder) -> None:
    assert_fails(invoke("export", "load", session.folder), "has no request that ended")


def test_a_tokenizer_that_is_none(session: SessionBuilder, tmp_path: Path) -> None:
    stories.swept(session)
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    done = invoke("export", "load", session.folder, "--format", "custom", "--tokenizer", file)
    assert_fails(done, "is no tokenizer that can be read")
