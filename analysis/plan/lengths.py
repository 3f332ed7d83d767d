# SPDX-License-Identifier: Apache-2.0
"""How long may a sequence be, by a model's config.json?

This is vLLM 0.32's reading (``derive_max_model_len_and_key`` and ``_get_and_verify_max_len``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from analysis.plan.entries import Config

_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
    "n_ctx",
)
_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of RoPE whose factor is in the length already."""


@dataclass(frozen=True)
class Longest:
    """``default``: tokens of the longest sequence that vLLM serves where it is not told.
    ``most``: what it may be told. Both are None where the configuration does not say it."""

    default: int | None
    most: int | None


def longest(config: Config) -> Longest:
    """How long a sequence may be.

    Raises:
        RuleError: an entry makes no sense.

    """
    stated = [config.whole("max_model_len", key, default=0) for key in _KEYS]
    known = [length for length in stated if length]
    if not known:
        return Longest(None, None)
    most = config.count("model_max_length") or min(known)
    kinds, factors = _scaling(config)
    if "gemma3" not in config.family:
        for kind, factor in zip(kinds, factors, strict=True):
            if kind not in _SCALED:
                most = int(most * factor)
    default = most
    if "longrope" in kinds:
        default = config.count("original_max_position_embeddings", default=most)
    return Longest(default, most)


def _scaling(config: Config) -> tuple[list[str], list[float]]:
    """The kinds of RoPE, and the factor of each."""
    found = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(found, dict):
        return [], []
    # Where kinds of layers differ, each has entries of its own.
    parts = [part for part in found.values() if isinstance(part, dict)] or [found]
    kinds, factors = [], []
    for part in parts:
        kinds.append(str(part.get("rope_type", part.get("type", "default"))))
        factors.append(_number(part.get("factor")))
    return kinds, factors


def _number(factor: Any) -> float:
    is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
    return float(factor) if is_number and 0 < factor < 1e6 else 1.0
