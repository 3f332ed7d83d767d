# SPDX-License-Identifier: Apache-2.0
"""What the fixture says of prompts is what vLLM's scheduler does with them, and a reader sees where
prompts part."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from analysis.errors import RuleError
from profilemate.contract.contract import Contract
from profilemate.contract.prompts import best_shared, parting, read
from profilemate.simulation.processes import Simulations
from tests.support.scheduler import RequestMaker, build_scheduler, step

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "cache_contract"


@pytest.fixture(scope="module")
def simulations() -> Iterator[Simulations]:
    with Simulations(1) as found:
        yield found


@pytest.fixture
def kv(simulations: Simulations, tmp_path: Path) -> Contract:
    return Contract(simulations, tmp_path)


def families(seed: int, count: int) -> list[list[int]]:
    """Prompts of some families; their lengths lie within blocks and at their ends."""
    chosen = random.Random(seed)
    stems = [[chosen.randrange(3, 500) for _ in range(chosen.choice((16, 40, 64)))] for _ in "abc"]
    return [
        chosen.choice(stems)
        + [chosen.randrange(3, 500) for _ in range(chosen.choice((1, 7, 8, 16, 23)))]
        for _ in range(count)
    ]


def hits_of_the_scheduler(
    model: Path, prompts: Sequence[Sequence[int]], blocks: int, *, at_once: bool
) -> list[int]:
    """What vLLM's scheduler found for each prompt's tokens themselves."""
    scheduler = build_scheduler(model, blocks + 1, block_size=8)
    make = RequestMaker(8)
    found: dict[str, int] = {}
    for number, prompt in enumerate(prompts):
        scheduler.add_request(make(f"{number}", list(prompt), 3))
        while scheduler.has_unfinished_requests() and (not at_once or number + 1 == len(prompts)):
            for admitted in step(scheduler).scheduled_new_reqs:
                found[admitted.req_id] = admitted.num_computed_tokens
    return [found[f"{number}"] for number in range(len(prompts))]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("seed", "blocks"), [(1, 500), (2, 14), (3, 25), (4, 30)])
def test_hits_are_those_of_the_scheduler(
    model: Path, kv: Contract, seed: int, blocks: int, at_once: bool
) -> None:
    prompts = families(seed, 20)
    run = kv.run(prompts, blocks=blocks, block_size=8, output_tokens=3, at_once=at_once)
    found = hits_of_the_scheduler(model, prompts, blocks, at_once=at_once)
    assert [*run.hits] == found
    assert sum(found) > 0
    assert run.query_tokens == sum(map(len, prompts))
    assert run.hit_rate == run.hit_tokens / run.query_tokens
    assert (run.evictions > 0) == (blocks < 500)


def test_a_prompt_that_never_fits(kv: Contract) -> None:
    run = kv.run([[1] * 30, [2] * 300, [1] * 30], blocks=10, block_size=8)
    assert run.hits == (0, None, 24)
    assert run.query_tokens == 60


def test_where_prompts_part() -> None:
    prompts = read([[*range(30)], [*range(20), 99, *range(9)], [*range(30), 5]], None)
    assert parting(prompts, 0, 1, 8) == (
        "prompts 0 and 1 part at token 20: token 4 of block 2, so 16 tokens can be found in the "
        "cache\n"
        "  prompt 0: [12, 13, 14, 15, 16, 17, 18, 19] | [20, 21, 22, 23, 24, 25, 26, 27]\n"
        "  prompt 1: [12, 13, 14, 15, 16, 17, 18, 19] | [99, 0, 1, 2, 3, 4, 5, 6]"
    )
    assert best_shared(prompts) == [(0, -1), (20, 0), (30, 0)]


def test_texts_part_where_they_are_read(kv: Contract) -> None:
    kv.tokenize = lambda text: [len(word) for word in text.split()]
    kv.assert_prefix_shared(["one two three", "one two four"], at_least=2)
    with pytest.raises(AssertionError, match="fewer than 3 tokens are shared") as caught:
        kv.assert_prefix_shared(["one two three", "one two four"], at_least=3)
    assert "prompt 1: 'one two ' | 'four'" in str(caught.value)


def test_what_a_file_says(kv: Contract, simulations: Simulations, tmp_path: Path) -> None:
    before = [[1] * 16 + [2], [1] * 16 + [3], [1] * 16 + [4], [1] * 16 + [5], [1] * 16 + [6]]
    was = kv.run(before, block_size=8)
    with pytest.raises(AssertionError, match="'pytest --kv-update' writes it"):
        kv.assert_unchanged("chat", was, before)
    Contract(simulations, tmp_path, update=True).assert_unchanged("chat", was, before)
    kv.assert_unchanged("chat", was, before)
    assert [path.name for path in (tmp_path / "kv_expected").iterdir()] == ["chat.json"]

    after = [[9, number, *prompt[2:]] for number, prompt in enumerate(before)]
    with pytest.raises(AssertionError) as caught:
        kv.assert_unchanged("chat", kv.run(after, block_size=8), after)
    said = str(caught.value).splitlines()
    assert said[1:3] == [
        "hit_rate: 0.7529 -> 0.0000 (tolerance 0.01)",
        "hit_tokens: 64 -> 0 (tolerance 0.01)",
    ]
    assert said[3].startswith("prompt 1 found 16 tokens, now 0; prompts 0 and 1 part at token 1:")
    assert said[-1] == "1 more prompts find less"
    kv.assert_unchanged("chat", kv.run(after, block_size=8), after, tolerance=1.0)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (lambda kv: kv.run([]), "there is no prompt"),
        (lambda kv: kv.run([[]]), "prompt 0 has no token"),
        (lambda kv: kv.run(["text"]), "prompt 0 is a text: set kv.tokenize"),
        (lambda kv: kv.run([[1]], blocks=0), "blocks is 0; give a number from 1 on"),
        (lambda kv: kv.run([[1, -2]]), "prompt 0 has a token that is no whole number from 0 on"),
        (lambda kv: kv.assert_prefix_shared([[1]], at_least=0), "are numbers from 1 on"),
        (lambda kv: kv.assert_unchanged("../x", None, [[1]]), "is no name of a file"),
    ],
)
def test_what_is_refused(kv: Contract, asked: Any, says: str) -> None:
    with pytest.raises(RuleError, match=says):
        asked(kv)


def example(folder: Path) -> subprocess.CompletedProcess[str]:
    """A pytest of the user's, in this folder."""
    plugin = ["-p", "profilemate.contract.plugin", "-c", "/dev/null", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, f"--rootdir={folder}", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_the_example_catches_a_template_that_breaks_reuse(tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLE, tmp_path / "example")
    test = folder / "test_chat.py"
    broken = "from chat import RULES, prompt_with_the_time_first as prompt"
    test.write_text(test.read_text().replace("from chat import RULES, prompt\n", f"{broken}\n"))
    assert broken in test.read_text()
    done = example(folder)
    assert "3 failed" in done.stdout, done.stdout + done.stderr
    assert "prompt 1: '<time>10:0' | '1</time>" in done.stdout
    shown = (ROOT / "docs" / "contract.md").read_text()
    for line in done.stdout.splitlines():
        if line.startswith("E  ") and "part at" in line:
            assert line.removeprefix("E").strip() in shown
