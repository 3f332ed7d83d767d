# SPDX-License-Identifier: Apache-2.0
"""``profilemate plan``: what it prints, and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.plan import sizes
from tests.analysis.builder import SessionBuilder
from tests.analysis.invoke import invoke
from tests.analysis.test_memory import RITUAL
from tests.analysis.test_text import one_line
from tests.plan.test_reality import CACHE, record
from tests.plan.truth import CONFIGS

LLAMA = CONFIGS / "llama-3.1-8b.json"
JAMBA = CONFIGS / "jamba-v0.1.json"


def printed(*arguments: object) -> str:
    ended = invoke("plan", *arguments, "--without-vllm")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.isascii()
    if "--json" not in arguments:
        # The first line is the model's name, which may be long.
        assert max(map(len, ended.stdout.splitlines()[1:])) <= 80
    return ended.stdout


def refused(*arguments: object) -> str:
    ended = invoke("plan", *arguments, "--without-vllm")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    return ended.stderr


def test_a_plan_in_words() -> None:
    """80 GiB x 0.9 less 16 GiB and 7 GiB: 49 GiB, 25,088 blocks of 2 MiB."""
    memory = ["--gpu", "80GiB", "--gpu-memory-utilization", "0.9", "--weights", "16GiB"]
    lengths = ["--max-model-len", "8192", "--average-len", "2050", "--worst-len", "4096"]
    said = one_line(printed(LLAMA, *memory, "--other-memory", "7GiB", *lengths))
    assert "A token takes 131,072 B all layers, in bfloat16" in said
    assert "A block takes 2.0 MiB on a GPU; 1 group, by profilemate" in said
    assert "vLLM may take 72.0 GiB 90.00 % of 80.0 GiB - weights 16.0 GiB given" in said
    assert "- other memory 7.0 GiB as given = for the KV cache 49.0 GiB" in said
    assert "Blocks 25,088 one of them vLLM's null block; 49.0 GiB on a GPU" in said
    assert "Tokens 401,408 as vLLM prints them At once 49.00x sequences of 8,192 tokens" in said
    # 25,087 blocks that can be had / 129, and / 256.
    assert "Average sequence 2,050 tokens 129 blocks, the last one 12.50 % used" in said
    assert "194 users at once" in said
    assert "Longest sequence 4,096 tokens 256 blocks" in said
    assert "97 users at once" in said
    assert "2,050 tokens 129 12.50 % 258.0 MiB 194.48" in said
    assert "0.8 41.0 GiB 20,992 335,872 41.00" in said
    assert "64 8.0 MiB 6,272 33 3.12 % 190.06" in said


def test_the_arithmetic_in_words() -> None:
    said = one_line(printed(LLAMA, "--gpu", "80GiB", "--max-model-len", "8192", "--explain"))
    assert (
        "1. Of a token, a layer (keys and values) 2 x 8 KV heads x 128 x 2 B = 4,096 bytes" in said
    )
    assert "32 layers x 4,096 = 131,072 bytes (config.json: num_hidden_layers)" in said
    assert "8,192 / 16, rounded up = 512 blocks (max_model_len)" in said


def test_groups_and_states_in_words() -> None:
    said = one_line(printed(CONFIGS / "nemotron-h-8b.json", "--gpu", "24GiB"))
    assert "State 6 up to 4 1,040 tokens 4,259,840 All tokens 1 4 1,040 tokens" in said
    assert "In brackets: what vLLM makes of it" in said


def test_plain_numbers() -> None:
    numbers = ["--layers", 32, "--kv-heads", 8, "--head-size", 128, "--max-model-len", 4096]
    said = one_line(printed(*numbers, "--parameters", "8B", "--gpu", "40GiB"))
    assert "A plan for the numbers given" in said
    assert "A token takes 131,072 B" in said
    assert "Longest sequence 4,096 tokens 256 blocks, the last one 100.00 % used; 512.0 MiB" in said
    assert "Parameters 8,000,000,000 --parameters" in said
    assert "- weights 14.9 GiB 8,000,000,000 parameters given, bfloat16" in said
    # 40 GiB x 0.92 - 16,000,000,000 bytes.
    assert "= for the KV cache 21.9 GiB" in said


def test_without_a_gpu() -> None:
    said = one_line(printed(LLAMA))
    assert "Memory of a GPU Weights 15.0 GiB an estimate" in said
    assert "At once" not in said


def test_a_cpu_in_words() -> None:
    """Jamba: 8,192 x 3 x 2 + 8,192 x 16 x 4 bytes are 140 tokens, in whole blocks of 128: 256, of
    which 40 GiB make 10,240, 4 layers each."""
    memory = ["--cpu-memory", "50GiB", "--weights", "5GiB", "--other-memory", "1GiB"]
    share = ["--gpu-memory-utilization", "0.92", "--explain"]
    said = one_line(printed(JAMBA, "--platform", "cpu-avx512-bf16", *memory, *share))
    assert "Platform CPU with AVX512-BF16, without AMX" in said
    assert "Memory of a CPU vLLM may take 46.0 GiB 92.00 % of 50.0 GiB" in said
    assert "Blocks 10,240 one of them vLLM's null block; 40.0 GiB on a CPU" in said
    assert "128 (256) 4.0 MiB 10,240" in said
    assert (
        "Of a state, a layer (Mamba) on a CPU 24,576 x 2 B + 131,072 x 4 B = 573,440 bytes" in said
    )
    assert "float32 on a CPU with AVX512-BF16, without AMX" in said
    assert "in multiples of 128 = 256 tokens (--block-size, and the 32 of a CPU's kernels)" in said
    assert "GPU" not in said


def test_the_platform_is_a_gpu_by_default() -> None:
    said = one_line(printed(JAMBA, "--gpu", "80GiB", "--explain"))
    assert "Platform GPU vLLM on CPUs lays the cache out differently: --platform cpu" in said
    assert "24,576 x 2 B + 131,072 x 2 B = 311,296 bytes" in said
    assert "the model's type on a GPU" in said
    assert "in multiples of 16 = 80 tokens (--block-size, and the 16 of a GPU's kernels)" in said
    found = json.loads(printed(JAMBA, "--gpu", "80GiB", "--json"))
    assert found["settings"]["platform"]["name"] == "gpu"
    assert found["settings"]["block_size"] == 16


def test_a_cpu_in_json() -> None:
    found = json.loads(printed(JAMBA, "--platform", "cpu-basic", "--json"))
    assert found["settings"]["platform"]["float32_states"] is False
    assert found["settings"]["block_size"] == 128
    here = json.loads(printed(JAMBA, "--platform", "cpu", "--json"))
    assert here["settings"]["platform"]["about"].endswith("as this machine's")


def test_json() -> None:
    found = json.loads(printed(LLAMA, "--gpu", "80GiB", "--json", "--weights", "16GiB"))
    assert found["plan_version"] == 1
    assert found["bytes_per_token"] == 131_072
    assert found["pool"]["blocks"] == found["memory"]["kv_bytes"] // 2**21
    assert found["layout"]["groups"][0]["token_bytes"] == 4096
    assert found["steps"][0]["name"].startswith("Of a token")


def test_a_session_in_words(session: SessionBuilder) -> None:
    record(
        session, RITUAL, cache={**CACHE, "blocks": 1000, "tokens": 16_000, "max_concurrency": 2.0}
    )
    said = one_line(printed(LLAMA, "--session", session.folder, "--weights", "16GiB"))
    assert f"Beside session {session.folder.name}" in said
    assert "Blocks 28,672 1,000 -96.51 %" in said
    assert "Blocks: -27,672 against the plan, of which Activations: -2,048; at the peak" in said
    assert "The number of blocks: -24,088; 1,000 blocks were made where 25,088 fit" in said
    found = json.loads(printed(LLAMA, "--session", session.folder, "--json"))
    assert [one["name"] for one in found["figures"]][:2] == [
        "A block of the pool",
        "Memory asked for",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name a model, or give --layers, --kv-heads and --head-size"),
        (["nothing"], "there is no nothing; name a model's folder"),
        (["--layers", 4], "name a model, or give --kv-heads, --head-size too"),
        ([LLAMA, "--layers", 4], "--layers is for a plan without MODEL; leave out one of the two"),
        ([LLAMA, "--gpu", "big"], "'big' is no GPU known here (V100-16GB, T4,"),
        ([LLAMA, "--gpu", "0GiB"], "--gpu '0GiB': no GPU has that little memory"),
        ([LLAMA, "--gpu", "9999TiB"], "--gpu '9999TiB': no GPU has that much memory"),
        ([LLAMA, "--gpu", "80"], "--gpu '80': no GPU has that little memory; write 80GiB"),
        (
            ["--layers", 10**9, "--kv-heads", 1, "--head-size", 64, "--max-model-len", 64],
            "--layers 1000000000: a model has fewer, at most 1,000 here",
        ),
        ([LLAMA, "--weights", "16 pounds"], "'16 pounds' is not a size"),
        ([LLAMA, "--kv-cache-dtype", "fp3"], "--kv-cache-dtype 'fp3' is not known here"),
        ([LLAMA, "--dtype", "int1"], "--dtype 'int1' is not known here"),
        ([LLAMA, "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization 1.5"),
        ([LLAMA, "--max-model-len", "0"], "--max-model-len 0: write a whole number"),
        ([LLAMA, "--average-len", "0"], "--average-len 0: write a whole number"),
        ([LLAMA, "--block-size", "-16"], "--block-size -16: write a whole number"),
        ([LLAMA, "--pipeline-parallel-size", "33"], "the model has 32 layers, fewer than stages"),
        ([LLAMA, "--parameters", "many"], "--parameters 'many' is not a number of parameters"),
        (["--layers", 1, "--kv-heads", 1, "--head-size", 64], "give --max-model-len"),
        (["--session", "nowhere"], "there is no folder nowhere"),
        ([LLAMA, "--platform", "tpu"], "--platform 'tpu' is not known here; write one of cpu, gpu"),
        ([LLAMA, "--platform", "cpu", "--gpu", "H100"], "give its memory with --cpu-memory"),
        ([LLAMA, "--cpu-memory", "64GiB"], "the plan is for a GPU: give its memory with --gpu"),
        ([LLAMA, "--cpu-memory", "64GiB", "--gpu", "H100"], "give one or the other"),
        ([LLAMA, "--platform", "cpu", "--cpu-memory", "0"], "no CPU has that much memory"),
        (
            [LLAMA, "--platform", "cpu", "--block-size", "16"],
            "--block-size 16: attention on a CPU reads blocks of a multiple of 32 tokens",
        ),
    ],
)
def test_one_clear_line(arguments: list[object], says: str) -> None:
    assert says in refused(*arguments)


def test_a_gpu_by_its_name() -> None:
    assert sizes.gpu_memory("h100")[0] == 81559 * 2**20
    assert sizes.gpu_memory("A100 80GB")[0] == 81920 * 2**20
    assert sizes.gpu_memory("24GB")[0] == 24 * 10**9


@pytest.mark.parametrize(
    ("text", "found"),
    [("80GiB", 80 * 2**30), ("1.5 gib", 3 * 2**29), ("512MB", 512 * 10**6), ("123", 123)],
)
def test_sizes(text: str, found: int) -> None:
    assert sizes.size(text) == found


def test_models_are_found_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LLAMA.read_text())
    assert f"A plan for {tmp_path}" in printed(tmp_path)


def test_a_vllm_that_does_not_work_here(tmp_path: Path) -> None:
    """One line says so, and the arithmetic here does."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('no such library')")
    ended = subprocess.run(
        [sys.executable, "-m", "profilemate", "plan", str(LLAMA), "--json"],
        cwd=Path(__file__).parent.parent.parent,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    said = "profilemate: planning without vLLM: it cannot be imported: no such library\n"
    assert ended.stderr == said
    assert json.loads(ended.stdout)["layout"]["decided_by"] == "profilemate"
