# SPDX-License-Identifier: Apache-2.0
"""Weights are what a folder's files hold, as they will lie in memory."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from analysis.errors import RuleError
from analysis.plan import config
from analysis.plan.settings import Settings
from analysis.plan.weights import Weights, measure
from tests.plan.truth import CONFIGS

GPT2 = config.read(CONFIGS / "gpt2.json")


def write(file: Path, **tensors: tuple[str, int]) -> None:
    """A safetensors file's header, without its data: names, types and bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [at, at + size]}
        at += size
    content = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(content)) + content)


def found(folder: Path, **settings: object) -> Weights:
    weights = measure(GPT2, Settings(**settings), folder)  # type: ignore[arg-type]
    assert weights is not None
    return weights


def test_headers_of_all_files(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00002.safetensors", a=("F16", 1000), b=("F16", 24))
    write(tmp_path / "model-00002-of-00002.safetensors", c=("F16", 976))
    weights = found(tmp_path, tensor_parallel=2)
    assert weights.total_bytes == 2000
    assert weights.stage_bytes == (1000,)
    assert weights.source == "headers of 2 safetensors files"
    assert not weights.is_estimate


def test_plain_numbers_are_cast_and_quantized_ones_are_not(tmp_path: Path) -> None:
    """1,000 bytes of float32 are 500 of float16; 8-bit numbers and their scales stay."""
    tensors = {"a": ("F32", 1000), "b": ("F8_E4M3", 300), "b_scale_inv": ("F32", 40)}
    write(tmp_path / "model.safetensors", **tensors)
    assert found(tmp_path).total_bytes == 500 + 300 + 40


def test_the_original_checkpoint_is_not_counted_twice(tmp_path: Path) -> None:
    write(tmp_path / "consolidated.safetensors", a=("F16", 1000))
    write(tmp_path / "model.safetensors", a=("F16", 1000))
    assert found(tmp_path).total_bytes == 1000


def test_an_index_without_its_files(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 4096}, "weight_map": {}}))
    assert found(tmp_path).total_bytes == 4096
    assert found(tmp_path).source.startswith("model.safetensors.index.json")


def test_sizes_of_older_files(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(123))
    assert found(tmp_path).total_bytes == 123


def test_an_estimate_where_there_are_no_files(tmp_path: Path) -> None:
    weights = found(tmp_path)
    assert weights.is_estimate
    # 50,257 tokens and 1,024 positions of 768, and 12 layers of 12 x 768 x 768.
    assert weights.total_bytes == 2 * ((50_257 + 1024) * 768 + 12 * 12 * 768 * 768)


def test_what_is_given_counts(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", a=("F16", 1000))
    assert found(tmp_path, weight_bytes=5000).total_bytes == 5000


def test_quantized_weights_are_estimated_by_their_width() -> None:
    """DeepSeek-V3: a byte a number, two of the embedding and of the head."""
    model = config.read(CONFIGS / "deepseek-v3.json")
    weights = measure(model, Settings(), None)
    assert weights is not None
    assert model.parameters is not None
    ends = 2 * 129_280 * 7168
    assert weights.total_bytes == model.parameters.total + ends


def test_a_quantization_of_unknown_width_has_no_estimate() -> None:
    entries = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    model = config.model({**entries, "quantization_config": {"quant_method": "new"}}, "config.json")
    assert measure(model, Settings(), None) is None


def test_weights_of_another_model_than_the_configuration_s() -> None:
    """GPT-2's embedding alone has 78,780,672 bytes: fewer in all are divided by layers."""
    weights = measure(GPT2, Settings(weight_bytes=12_000, pipeline_parallel=4), None)
    assert weights is not None
    assert weights.stage_bytes == (3000,) * 4


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        struct.pack("<Q", 2**40),
        header(b"{..}"),
        header(b'{"a": {"dtype": "F16", "data_offsets": [100, 0]}}'),
        header(b'{"a": {"dtype": "F16", "data_offsets": [0, Infinity]}}'),
        header(b"[" * 100_000),
    ],
    ids=["empty", "short", "too long", "no JSON", "backwards", "without an end", "nested"],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(RuleError, match=r"model\.safetensors is damaged"):
        found(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(RuleError, match="is damaged"):
        found(tmp_path)


@pytest.mark.parametrize("content", ['{"metadata": {"total_size": Infinity}}', "[" * 100_000])
def test_an_index_that_makes_no_sense(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(RuleError, match="is damaged"):
        found(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(RuleError, match=r"model\.safetensors is no regular file; give --weights"):
        found(tmp_path)
