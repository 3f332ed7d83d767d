# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face baseline: what may run beside it, and that it has the benchmark's prompts."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from analysis.errors import RuleError
from demo.tiny_model import write_model
from profilemate.sweep import baseline

VLLM = str(Path(sys.executable).with_name("vllm"))
BENCHMARK = [VLLM, "bench", "throughput"]


@pytest.mark.parametrize(
    "command",
    [["vllm", "bench", "serve"], ["sh", "run.sh"], ["bench", "throughput"], [VLLM, "bench"]],
)
def test_another_command_has_none(command: list[str]) -> None:
    with pytest.raises(RuleError, match="works for 'vllm bench throughput' alone"):
        baseline.check(command, {})


@pytest.mark.parametrize(
    "name", ["input-len", "random_input_len", "num-prompts", "model", "dataset-name", "seed"]
)
def test_prompts_have_to_be_the_same_in_all_runs(name: str) -> None:
    with pytest.raises(RuleError, match=f"and {name} changes them"):
        baseline.check(BENCHMARK, {"max-num-seqs": "4", name: "1"})


def test_one_answer_a_prompt(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="leave --n out"):
        baseline.check([*BENCHMARK, "--n", "2"], {})


def test_a_missing_package_is_named_before_anything_runs(tmp_path: Path) -> None:
    # A Python that has nothing, as the one that runs this vllm.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    script = tmp_path / "vllm"
    script.write_text(f"#!{python}\n")
    script.chmod(0o755)
    with pytest.raises(RuleError) as refused:
        baseline.check([str(script), "bench", "throughput", "-tp", "2"], {})
    said = str(refused.value)
    assert said.startswith(
        f"--baseline hf needs torch and transformers and vllm and accelerate, which {python} does"
    )
    assert f"{python} -m pip install torch transformers vllm accelerate" in said


def test_the_command_is_the_benchmarks_in_vllms_python(tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    script.write_text("#!/bin/sh\n'''exec' /opt/vllm/bin/python3.12 \"$0\" \"$@\"\n' '''\n")
    script.chmod(0o755)
    template = ["nice", str(script), "bench", "throughput", "--model", "m", "--max-num-seqs={s}"]
    made = baseline.command(template, {"s": "4", "block-size": "32"}, tmp_path, 16)
    assert made[:3] == ["nice", "/opt/vllm/bin/python3.12", "-c"]
    # The result, the batch, the GPUs, and the benchmark's own options; no setting is appended.
    assert made[5:] == [
        *(str(tmp_path / "generated.json"), "16", "1"),
        *("--model", "m", "--max-num-seqs=4"),
    ]
    module = ["/usr/bin/python3", "-m", "vllm.entrypoints.cli.main", "bench", "throughput"]
    assert baseline.command(module, {}, tmp_path, 8)[:2] == ["/usr/bin/python3", "-c"]


@pytest.mark.engine
def test_its_prompts_are_those_that_the_benchmark_hands_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    write_model(model)
    options = [
        *("--model", str(model), "--load-format", "dummy", "--dtype", "float32"),
        *("--max-model-len", "512", "--num-prompts", "10", "--num-warmups", "3", "--seed", "7"),
        *("--dataset-name", "random", "--random-input-len", "60", "--random-output-len", "5"),
        *("--random-range-ratio", "0.5", "--random-prefix-len", "8"),
    ]
    # Beside the other process, which takes as long to import the same.
    command = baseline.command([*BENCHMARK, *options], {}, tmp_path, 4)
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=variables)
    try:
        handed = _handed_to_the_engine(options, monkeypatch)
        assert process.wait(300) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    written = json.loads((tmp_path / "generated.json").read_text())
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer(request.prompt).input_ids for request in handed]
    assert len({len(each) for each in ids}) > 1, "lengths are drawn, too"
    assert written["input_lengths"] == sorted(map(len, ids))
    digest = hashlib.sha256()
    for each in ids:
        digest.update(json.dumps(each).encode())
    assert written["prompts_digest"] == digest.hexdigest()
    assert written["output_tokens"] == sum(request.expected_output_len for request in handed)
    assert written["weights"] == "random"
    assert written["seconds"] > 0


def _handed_to_the_engine(options: list[str], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ``vllm bench throughput`` would have its engine answer; there is none here."""
    from vllm.benchmarks import throughput
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    handed: list[Any] = []

    def engine(requests: list[Any], *_: Any, **__: Any) -> tuple[float, None]:
        handed.extend(requests)
        return 1.0, None

    monkeypatch.setattr(throughput, "run_vllm", engine)
    parser = FlexibleArgumentParser()
    throughput.add_cli_args(parser)
    args: Namespace = parser.parse_args(options)
    throughput.main(args)
    return handed
