# SPDX-License-Identifier: Apache-2.0
"""How many bytes do the weights take on a GPU?"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.errors import RuleError
from analysis.plan.built import Built, Held
from analysis.plan.model import Model
from analysis.plan.settings import Settings
from analysis.plan.sizes import element_bytes
from analysis.plan.specs import bounds

INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000
"""Bytes of a safetensors header. No writer makes a longer one."""

_NOT_JSON = (ValueError, RecursionError)
"""The errors of Python's JSON reader."""

_PLAIN = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class Weights:
    """The memory of the weights. ``total_bytes``: bytes of the whole model in memory.
    ``stage_bytes``: bytes on a GPU of each pipeline stage. ``source``: where the figures come
    from. ``is_estimate``: whether they are an estimate from the configuration."""

    total_bytes: int
    stage_bytes: tuple[int, ...]
    source: str
    is_estimate: bool


def measure(
    model: Model, settings: Settings, folder: Path | None, built: Built | None = None
) -> Weights | None:
    """The memory of the weights: as given, else by the folder's files, else by vLLM's classes, else
    by an estimate; None where there is none of these.

    Raises:
        RuleError: a file of weights cannot be read or is damaged.

    """
    if settings.weight_bytes is not None:
        return _divided(settings.weight_bytes, "given", False, model, settings)
    found = None if folder is None else _of_files(folder, model)
    if found is not None:
        return _divided(*found, False, model, settings)
    if built is not None and "parameters" not in model.sources:
        return _of_classes(model, settings, built)
    if model.parameters is None:
        return None
    total = _estimated(model)
    given = "parameters" in model.sources
    how = "given" if given else "estimated from config.json"
    source = f"{model.parameters.total:,} parameters {how}, {model.dtype}"
    if model.quantization is not None:
        source += f", {model.quantization}"
    return None if total is None else _divided(total, source, not given, model, settings)


def _of_classes(model: Model, settings: Settings, built: Built) -> Weights | None:
    """The weights of vLLM's own modules; None where the bytes of a quantized number are not
    known."""
    source = f"vLLM {built.release}'s {built.architecture}, {model.dtype}"
    if model.quantization is None:
        stages = tuple(one.total_bytes for one in built.held)
        whole = sum(stages) * settings.tensor_parallel
        return Weights(whole, stages, source, False)
    if model.quantized_bytes is None:
        return None
    stages = tuple(_quantized(one, model, model.quantized_bytes) for one in built.held)
    total = sum(stages) * settings.tensor_parallel
    return Weights(total, stages, f"{source}, {model.quantization}", True)


def _quantized(held: Held, model: Model, width: float) -> int:
    plain = element_bytes(model.dtype, "--dtype")
    dense = plain if model.quantization == "mxfp4" else width
    return round(held.ends * plain + held.dense * dense + held.experts * width)


def _estimated(model: Model) -> int | None:
    """Bytes of the model's parameters; None where the bytes of a quantized number are not
    known."""
    found = model.parameters
    plain = element_bytes(model.dtype, "--dtype")
    if found is None or (model.quantization is not None and model.quantized_bytes is None):
        return None
    width = model.quantized_bytes or plain
    # MXFP4 quantizes the experts alone.
    dense = plain if model.quantization == "mxfp4" else width
    ends = (found.embedding + found.head) * plain
    return round(ends + found.dense * dense + found.experts * width)


def _divided(
    total: int, source: str, is_estimate: bool, model: Model, settings: Settings
) -> Weights:
    """The weights as the GPUs share them. The stages divide the layers; the first has the
    embedding, the last the head. The GPUs of a stage divide each matrix."""
    stages, gpus = settings.pipeline_parallel, settings.tensor_parallel
    if stages == 1:
        return Weights(total, (-(-total // gpus),), source, is_estimate)
    width = element_bytes(model.dtype, "--dtype")
    embedding = (model.parameters.embedding if model.parameters else 0) * width
    head = (model.parameters.head if model.parameters else 0) * width
    if embedding + head > total:
        # The configuration is not that of the model with these weights.
        embedding = head = 0
    layers, count = total - embedding - head, len(model.layers)
    by_stage = [layers * (last - first) // count for first, last in bounds(count, stages)]
    by_stage[0] += embedding
    # Where the head is the embedding, the last stage has a copy.
    by_stage[-1] += head or embedding
    return Weights(total, tuple(-(-stage // gpus) for stage in by_stage), source, is_estimate)


def _of_files(folder: Path, model: Model) -> tuple[int, str] | None:
    """Bytes of the folder's weights, and which files they come from; None where it has none."""
    try:
        files = sorted(folder.glob("*.safetensors"))
        # A folder may hold the original checkpoint beside the converted one.
        files = [file for file in files if not file.name.startswith("consolidated")] or files
        if files:
            total = sum(_tensor_bytes(file, model) for file in files)
            return total, f"headers of {len(files)} safetensors files"
        if (folder / INDEX).is_file():
            return _index_bytes(folder / INDEX), f"{INDEX}: metadata.total_size"
        torch_files = sorted(folder.glob("pytorch_model*.bin"))
        if torch_files:
            return sum(os.path.getsize(file) for file in torch_files), "sizes of pytorch_model*.bin"
    except OSError as error:
        raise RuleError(
            f"cannot read {folder}: {error.strerror or error}; give --weights"
        ) from None
    return None


def _tensor_bytes(file: Path, model: Model) -> int:
    """Bytes of a file's tensors in memory. vLLM casts plain numbers to the type that the model
    computes in."""
    plain = element_bytes(model.dtype, "--dtype")
    total = 0
    for name, dtype, length in _tensors(file):
        width = _PLAIN.get(dtype)
        # vLLM does not cast the scales of quantized weights.
        cast = width is not None and not name.endswith(("_scale", "_scale_inv", ".scales"))
        total += length * plain // width if cast and width else length
    return total


def _tensors(file: Path) -> Iterator[tuple[str, str, int]]:
    """Name, type and bytes of each tensor of a safetensors file."""
    # A pipe or a device may never end.
    if not file.is_file():
        raise RuleError(f"{file} is no regular file; give --weights")
    with file.open("rb") as opened:
        start = opened.read(8)
        (length,) = struct.unpack("<Q", start) if len(start) == 8 else (0,)
        if not 0 < length <= _LONGEST_HEADER:
            raise _damaged(file)
        header = opened.read(length)
    try:
        entries = json.loads(header)
        for name, entry in entries.items():
            if name != "__metadata__":
                begin, end = map(int, entry["data_offsets"])
                if not 0 <= begin <= end:
                    raise _damaged(file)
                yield name, str(entry["dtype"]), end - begin
    except (*_NOT_JSON, OverflowError, TypeError, KeyError, AttributeError):
        raise _damaged(file) from None


def _index_bytes(file: Path) -> int:
    """Bytes of all weights, as a safetensors index states them."""
    try:
        index: Any = json.loads(file.read_bytes())
    except _NOT_JSON:
        raise _damaged(file) from None
    metadata = index.get("metadata") if isinstance(index, Mapping) else None
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if isinstance(total, bool) or not isinstance(total, (int, float)) or not 0 < total < math.inf:
        raise _damaged(file)
    return int(total)


def _damaged(file: Path) -> RuleError:
    return RuleError(f"{file} is damaged: no tensors can be read from it; give --weights")
