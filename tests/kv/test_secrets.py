# SPDX-License-Identifier: Apache-2.0
"""What a session's files never hold: secrets, prompts, tokens, answers."""

from __future__ import annotations

import argparse
import shlex
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profilemate.record import known_options
from profilemate.record.redact import public_name, redact
from tests.kv.recording import hooks_only, make_tables, only_session
from tests.support.scheduler import RequestMaker, build_scheduler, tokens

CANARY = "Hunter2Canary"
KEY = f"hf_{CANARY}Xk29"
"""A value that is a key by its looks."""


SPELLINGS = (
    # vLLM's own, with every way to write an option
    f"--api-key {CANARY}",
    f"--api-key={CANARY}",
    f"--api_key {CANARY}",
    f"--api_key={CANARY}",
    f"--api-key a {CANARY} b",
    f"--api-k {CANARY}",
    f"--API-KEY {CANARY}",
    f"--hf-token {CANARY}",
    f"--hf-token={CANARY}",
    f"--ssl-keyfile /etc/{CANARY}",
    f"--ssl-keyfile-password {CANARY}",
    f"--otlp-traces-endpoint http://user:{CANARY}@host:4317",
    f"--middleware {CANARY}",
    f"--chat-template '{{{{ {CANARY} }}}}'",
    f"--lora-modules {CANARY}=/models/x",
    f"--revision {CANARY}",
    f"--allowed-headers '[\"{CANARY}\"]'",
    f"--root-path /{CANARY}",
    # headers, variables, code
    f"-H 'Authorization: Bearer {CANARY}'",
    f"--header 'Authorization: Bearer {CANARY}'",
    f"--header='X-Api-Key: {CANARY}'",
    f"NAME_TOKEN={CANARY}",
    f"HF_TOKEN={CANARY} vllm",
    f"--env HF_TOKEN={CANARY}",
    f"-e HF_TOKEN={CANARY}",
    f"-p{CANARY}",
    f"-p {CANARY}",
    f"-p={CANARY}",
    f"-u user:{CANARY}",
    f"--user=user:{CANARY}",
    f"--{CANARY}",
    f"--{CANARY}=1",
    f"--a.{CANARY} 1",
    f"-{CANARY}",
    f"--token -{CANARY}",
    f"--token --{CANARY}",
    f"--pw '{CANARY} {CANARY}'",
    f"-- {CANARY}",
    f"{CANARY}",
    f"'{CANARY}\n--x'",
    # JSON
    f'--speculative-config \'{{"method": "{CANARY}"}}\'',
    f'--speculative-config \'{{"model": "{KEY}"}}\'',
    f'--speculative-config=\'{{"model": "https://{CANARY}@host/m"}}\'',
    f"--speculative-config.revision {CANARY}",
    f"--speculative-config.model {KEY}",
    f"-sc.{CANARY} 1",
    f"--hf-overrides '{{\"{CANARY}\": 1}}'",
    f'--hf-overrides \'{{"rope_type": ["{CANARY}"]}}\'',
    f'--kv-transfer-config \'{{"kv_connector": "{CANARY}", "kv_role": "kv_both"}}\'',
    f'--kv-transfer-config \'{{"kv_connector_extra_config": {{"secret_key": "{CANARY}"}}}}\'',
    f'--kv-transfer-config \'{{"secret_access_key":"{CANARY}"}}\'',
    f'--kv-transfer-config \'{{"a": "{{\\"api_key\\": \\"{CANARY}\\"}}"}}\'',
    f'--kv-transfer-config \'{{"model": {{"model": "user:{CANARY}@host"}}}}\'',
    f'--model-loader-extra-config \'{{"aws_secret_access_key": "{CANARY}"}}\'',
    f'--additional-config \'{{"password": "{CANARY}"}}\'',
    f"--additional-config.password {CANARY}",
    f'--compilation-config \'{{"inductor_compile_config": {{"x": "{CANARY}"}}}}\'',
    f'--compilation-config \'{{"mode": "{CANARY}\'',
    f'-cc \'{{"backend": "{CANARY}"}}\'',
    f"-cc.backend={CANARY}",
    f"-cc.custom_ops+ {CANARY}",
    f'-O \'{{"level": "{CANARY}"}}\'',
    f"-O{CANARY}",
    # URLs
    f"--model https://{CANARY}@huggingface.co/org/m",
    f"--model https://user:{CANARY}@huggingface.co/org/m",
    f"--model https://user:p@ss/{CANARY}@host/org/m",
    f"--model s3://key:{CANARY}@bucket/m",
    f"--model s3://key:se/cr@{CANARY}@bucket/m",
    f"--model 's3://bucket/m?X-Amz-Signature={CANARY}'",
    f"--model 'https://host/m?token={CANARY}'",
    f"--model 'https://host/m#{CANARY}'",
    f"--model 'https://host/m;{CANARY}'",
    f"--model https://host%2F{CANARY}/m",
    f"--model=redis://:{CANARY}@host:1",
    f"--tokenizer 'git+ssh://git:{CANARY}@host/m'",
    f"--served-model-name 'a b={CANARY}'",
    f"redis://user:{CANARY}@host:1",
    f"https://host/path?token={CANARY}",
    # Values that are keys by their looks, where a name may stand
    f"--model {KEY}",
    f"--model /models/{KEY}/x",
    f"--served-model-name m {KEY}",
    f"--served-model-name sk-proj-{CANARY}Xk29",
    f"--served-model-name 'Bearer {CANARY}'",
    f"--model AKIA{CANARY}",
    f"--model eyJhbGciOi.{CANARY}.x",
    f"--model {CANARY}0a1b2c3d4e5f6a7b8c9d",
    # Values that only look as if they were the option's
    f"--dtype {CANARY}",
    f"--max-model-len {CANARY}",
    f"--max-model-len 4096 {CANARY}",
    f"--max-model-len=4096{CANARY}",
    f"--seed 1{CANARY}",
    f"--host {CANARY}",
    f"--tensor-parallel-size 2 {CANARY}",
    f"-tp {CANARY}",
    f"--enforce-eager {CANARY}",
    f"--enforce-eager={CANARY}",
    f"--no-enable-prefix-caching={CANARY}",
    f"--kv-cache-dtype fp8 {CANARY}",
    f"--config 'x={CANARY}.yaml'",
)


BEFORE = (
    "vllm serve org/model",
    "/usr/bin/python3 -u /venv/bin/vllm serve --dtype auto org/model",
    "python -m vllm.entrypoints.openai.api_server",
    "python serve.py",
    "serve.py --my-option",
)


def test_random_characters_with_a_word_before_them() -> None:
    """They may have slashes among them, as paths do."""
    key = "Vr1K9AK4PC/o8BJJxHEfdJ9YK/iHd0f5V5CH4udL"
    assert redact(["vllm", "serve", "--model", f"tokenBearer {key}"])[-1] == "***"


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_spelling_of_a_secret_stays(spelling: str) -> None:
    for before in BEFORE:
        argv = [*shlex.split(before), *shlex.split(spelling)]
        kept = redact(argv)
        assert CANARY not in " ".join(kept)
        assert len(kept) == len(argv)
        # It does not take the rest with it.
        assert kept[:2] == argv[:2]


@pytest.mark.parametrize(
    "line",
    [
        f"python -c '{CANARY}'",
        f'python -c \'import os; os.environ["TOKEN"]="{CANARY}"\' {CANARY}',
        f"python3.12 -uc '{CANARY}' serve {CANARY} {CANARY}",
        f"python -c{CANARY} {CANARY}",
        f"python -X {CANARY} -W {CANARY} -X{CANARY} serve.py {CANARY}",
        f"python - {CANARY}",
        f"python -m 'x={CANARY}' {CANARY}",
        f"python 'x={CANARY}'",
        f"'vllm serve m --api-key {CANARY}='",
        f"https://user:{CANARY}@host",
        f"python serve.py {CANARY} --x",
        f"env HF_TOKEN={CANARY} vllm serve m",
        f"vllm bench throughput {CANARY}",
        f"vllm serve org/m {CANARY}",
        f"vllm serve --unknown {CANARY} {CANARY}",
    ],
)
def test_no_secret_stays_in_what_is_run(line: str) -> None:
    assert CANARY not in " ".join(redact(shlex.split(line)))


def vllms_options() -> list[argparse.Action]:
    """Every option of ``vllm serve``, from vLLM's own parser."""
    pytest.importorskip("vllm")
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    return [action for action in make_arg_parser(FlexibleArgumentParser())._actions if action.dest]


VALUES = (
    CANARY,
    f"{CANARY}=1",
    f"https://user:{CANARY}@host/m?token={CANARY}",
    f'{{"{CANARY}": "{CANARY}", "model": "u:{CANARY}@h", "method": "{CANARY}"}}',
    f'["{CANARY}", {{"api_key": "{CANARY}"}}]',
)


def test_no_option_of_vllms_keeps_a_secret() -> None:
    options = [name for action in vllms_options() for name in action.option_strings]
    assert len(options) > 200
    shown = 0
    for option in options:
        for name in (option, option.replace("-", "_").replace("__", "--", 1)):
            for value in VALUES:
                if value == CANARY and option.lstrip("-") in known_options.NAMES:
                    # A model may be called so.
                    continue
                for given_as in ([name, value], [f"{name}={value}"], [f"{name}.x={value}"]):
                    kept = redact(["vllm", "serve", "m", *given_as, "--port", "1"])
                    assert CANARY not in " ".join(kept), given_as
                    shown += kept[-2:] == ["--port", "1"]
    assert shown > 1000


def test_what_options_of_vllms_mean_stays() -> None:
    """Numbers, switches and choices, of every option that has them."""
    for action in vllms_options():
        for option in action.option_strings:
            if action.nargs == 0:
                assert redact(["vllm", "serve", option, "org/m"])[2:] == [option, "org/m"]
            elif action.choices is not None:
                for choice in filter(None, map(str, action.choices)):
                    if choice != "None":
                        words = ["vllm", "serve", "m", option, choice]
                        assert redact(words) == words
            elif action.type in (int, float):
                words = ["vllm", "serve", "m", option, "4096", f"{option}=0.5"]
                assert redact(words) == words


HARMLESS = (
    "vllm serve MODEL",
    "vllm serve Qwen/Qwen3-8B",
    "/usr/bin/python3 /usr/local/bin/vllm serve meta-llama/Meta-Llama-3.1-8B-Instruct",
    "python3.11 -u -m vllm.entrypoints.openai.api_server --model /models/l-3.1_8b --port 8000",
    "python -m vllm.entrypoints.cli.main serve org/m -tp 2 -pp 2 -dp 4 -q fp8 -ep -n 2 -r 0",
    (
        "vllm serve org/m --tensor-parallel-size=8 --max-model-len 32k "
        "--gpu-memory-utilization 0.92 "
        "--max-num-batched-tokens 8192 --kv-cache-dtype fp8 --dtype bfloat16 "
        "--max-num-seqs 256 --enforce-eager "
        "--enable-prefix-caching --no-enable-chunked-prefill --block-size 16 "
        "--trust-remote-code --quantization compressed-tensors --swap-space 4 --host 0.0.0.0"
    ),
    "vllm serve --dtype auto --enforce-eager org/m --num_gpu_blocks_override 122",
    "vllm serve s3://bucket/models/llama --load-format runai_streamer --max-model-len auto",
    (
        "vllm serve /models/cache/huggingface/hub/models--org--m/snapshots/"
        "0123456789abcdef0123456789abcdef01234567 --served-model-name prod m-2 gguf:Q4_K_M"
    ),
    "vllm serve org/m --config serve.yaml --kv-cache-metrics --kv-cache-metrics-sample 1.0",
    "vllm serve org/m -O3 -O.level=3 -cc.mode=3 -cc.cudagraph_mode FULL_DECODE_ONLY",
    "vllm serve org/m --cudagraph-capture-sizes 1 2 4 8 --attention-backend FLASH_ATTN",
    "vllm serve org/m --speculative-config.model org/draft --speculative-config.method eagle3",
    "vllm bench throughput --model org/m --num-prompts 100 --input-len 32 --output-len 128",
    (
        'vllm serve org/m --compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE", '
        '"cudagraph_capture_sizes": [1, 2, 4], "custom_ops": ["none", "+rms_norm"], "level": 3}\''
    ),
    (
        'vllm serve org/m --speculative-config \'{"method": "ngram", "num_speculative_tokens": 5, '
        '"prompt_lookup_max": 4, "model": "/models/draft"}\''
    ),
    (
        'vllm serve org/m --kv-transfer-config \'{"kv_connector": "NixlConnector", "kv_role": '
        '"kv_both"}\''
    ),
    (
        'vllm serve org/m --hf-overrides \'{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, '
        '"original_max_position_embeddings": 32768}}\' --limit-mm-per-prompt \'{"image": 2}\''
    ),
)


NAMES = [
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "Qwen3-Coder-480B-A35B-Instruct-FP8",
    "Meta-Llama-3.1-405B-Instruct-AWQ-INT4",
    "Mixtral-8x22B-Instruct-v0.1-AWQ-INT4",
    "gpt-oss-120b",
    "Qwen3-235B-A22B-Instruct-2507-int4-AutoRound",
    "Llama-3_1-Nemotron-Ultra-253B-v1",
    "gemma-3-27b-it",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_models_stay(name: str) -> None:
    for place in (["--model", f"org/{name}"], [f"--served-model-name={name}"], [f"/mnt/{name}"]):
        assert redact(["vllm", "serve", *place]) == ["vllm", "serve", *place]


@pytest.mark.parametrize("line", HARMLESS)
def test_what_explains_a_session_stays(line: str) -> None:
    assert redact(shlex.split(line)) == shlex.split(line)


def test_names_of_options_of_others_stay() -> None:
    given_words = ["python", "serve.py", "--fork", "--my_own", "x", "-v", "--a-b=c"]
    kept = ["python", "serve.py", "--fork", "--my_own", "***", "-v", "--a-b=***"]
    assert redact(given_words) == kept


@given(st.lists(st.one_of(st.text(), st.sampled_from(sorted(known_options.SHORT)), st.none())))
def test_whatever_the_command_line_is(argv: list[Any]) -> None:
    assert len(redact(argv)) == len(argv)


def test_nothing_is_kept_of_what_is_not_understood() -> None:
    no_text: Any = None
    assert redact(["vllm", "serve", "m", no_text, "--port", "1"]) == ["***"] * 6


@pytest.mark.parametrize(
    "value",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 1_000_000,
        '{"mode": ' + "9" * 5_000 + "}",
        '{"mode": ' + "9" * 60 + "}",
        "\udcff\ud800\0",
        "-" * 1_000_000,
        "--" + "a-" * 500_000,
        "--" + "a" * 1_000_000,
        "--speculative-config" + ".model" * 100_000,
        "-cc.mode" + "+" * 100_000,
        "hf_" * 300_000,
        "",
    ],
    ids=lambda value: value[:12],
)
def test_absurd_arguments_are_hidden(value: str) -> None:
    for option in ("--model", "--compilation-config", "--seed", "--x", "-cc.mode"):
        kept = redact(["vllm", "serve", "m", option, value, f"{option}={value}"])
        assert max(map(len, kept)) < 60


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("my own model, v2 (new)", "my own model, v2 (new)"),
        ("/models/größe=3/7b", "/models/größe=3/7b"),
        ("s3://bucket/model", "s3://bucket/model"),
        (f"s3://key:{CANARY}@bucket/model", "***"),
        (f"https://host/m?token={CANARY}", "***"),
        (f"user:{CANARY}@host/m", "***"),
        (KEY, "***"),
    ],
)
def test_a_models_name_without_credentials(name: str, shown: str) -> None:
    assert public_name(name) == shown


ENVIRONMENT = (
    "HF_TOKEN",
    "OPENAI_API_KEY",
    "VLLM_API_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)


def test_no_file_of_a_session_holds_a_secret_or_a_token(
    model: Path, hooks_on: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Journal and tables of vLLM's own scheduler, byte for byte."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, f"{CANARY}-{name}")
    monkeypatch.setattr(
        sys, "orig_argv", ["vllm", "serve", "m", "--api-key", CANARY, f"TOKEN={CANARY}", CANARY]
    )
    sessions = tmp_path / "sessions"
    prompts = [tokens(seed, 40) for seed in range(3)]
    answers = list(range(431, 441))
    given_out = iter(answers * 3)
    with hooks_only(sessions):
        scheduler = build_scheduler(model, 40, served_model_name=f"s3://k:{CANARY}@bucket/m")
        make = RequestMaker()
        for number, prompt in enumerate(prompts):
            scheduler.add_request(make(f"request-{number}", prompt, len(answers)))
            _run(scheduler, given_out)
    session = only_session(sessions)
    made = make_tables(session, tmp_path / "tables")
    assert made.requests()["request-1"]["output_length"] == len(answers)
    files = [path for folder in (session, made.folder) for path in folder.rglob("*")]
    contents = {path.name: path.read_bytes() for path in files if path.is_file()}
    assert {"session.json", "engine0.journal", "metadata.json", "requests.jsonl"} <= set(contents)
    assert b"request-1" in contents["engine0.journal"]
    forbidden = [CANARY.encode(), *(name.encode() for name in ENVIRONMENT)]
    for sequence in (*prompts, answers):
        forbidden += _written(sequence)
    for name, content in contents.items():
        for secret in forbidden:
            assert secret not in content, (name, secret)


def _run(scheduler: Any, answers: Any) -> None:
    from profilemate.simulation import parts

    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        scheduler.update_from_output(
            output, parts.answer(scheduler, output, lambda request: next(answers))
        )


def _written(sequence: list[int]) -> list[bytes]:
    """Four consecutive tokens as some program might write them, wherever they begin."""
    forms = []
    for at in range(len(sequence) - 3):
        four = sequence[at : at + 4]
        forms += [struct.pack(f"{order}4{size}", *four) for order in "<>" for size in "HIQ"]
        forms += [separator.join(map(str, four)).encode() for separator in (",", ", ", " ", "\n")]
    return forms
