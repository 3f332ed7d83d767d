# SPDX-License-Identifier: Apache-2.0
"""What groups, and what size of block, does the vLLM that is installed make of a model's layers?

vLLM's own ``get_kv_cache_configs`` is asked, with memory enough for any pool: it divides the
memory by a block's bytes, so the blocks that it makes of it tell these.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from analysis.errors import RuleError
from analysis.plan.groups import Group, Layout, described
from analysis.plan.specs import Spec, Stage

_MEMORY = 2**60
_PLENTY = 2**66
"""Bytes for the stage that is asked about, and for the others, which so never decide."""


class NoVllmError(Exception):
    """vLLM cannot be asked; the text says why, in one line."""


def group(stages: Sequence[Stage]) -> Layout:
    """The groups by vLLM's arithmetic.

    Raises:
        NoVllmError: it cannot be imported, or its release is too different.
        RuleError: vLLM refuses the layers.

    """
    # It warns of padding and of missing accelerators, which says nothing of the plan.
    logging.disable(logging.WARNING)
    try:
        return _asked(stages)
    finally:
        logging.disable(logging.NOTSET)


def _asked(stages: Sequence[Stage]) -> Layout:
    try:
        import vllm
        from vllm.v1.core import kv_cache_utils
    except Exception as error:
        raise NoVllmError(f"it cannot be imported: {_line(error)}") from None
    try:
        settings = _settings()
        asked = [{name: _told(spec) for name, spec in stage.items()} for stage in stages]
    except Exception as error:
        raise NoVllmError(f"{vllm.__version__} has other settings: {_line(error)}") from None

    def made(deciding: int) -> Any:
        memory = [_MEMORY if stage == deciding else _PLENTY for stage in range(len(stages))]
        try:
            return kv_cache_utils.get_kv_cache_configs(settings, asked, memory)
        except (NotImplementedError, ValueError) as error:
            raise RuleError(f"vLLM {vllm.__version__} refuses these layers: {error}") from None
        except Exception as error:
            raise NoVllmError(f"{vllm.__version__} fails: {_line(error)}") from None

    found = [made(stage) for stage in range(len(stages))]
    specs = {name: spec for stage in stages for name, spec in stage.items()}
    return Layout(
        groups=tuple(
            _group(parts, specs)
            for parts in zip(*(one.kv_cache_groups for one in found[0]), strict=True)
        ),
        bytes_per_block=tuple(
            _bytes_per_block(configs[stage].num_blocks) for stage, configs in enumerate(found)
        ),
        decided_by=f"vLLM {vllm.__version__}",
    )


def _bytes_per_block(blocks: int) -> int:
    """The only size of which so many, and no more, fit into the memory."""
    size = round(_MEMORY / blocks)
    if _MEMORY // size != blocks:
        raise NoVllmError(f"{blocks:,} blocks of {_MEMORY:,} bytes tell no size")
    return size


def _group(parts: Sequence[Any], specs: Stage) -> Group:
    """A group as all stages have it together."""
    names = [name for part in parts for name in part.layer_names]
    spec = parts[0].kv_cache_spec
    # A group of layers of several sizes keeps the spec of each.
    each = getattr(spec, "kv_cache_specs", None)
    told = next(iter(each.values())) if each else spec
    ours = specs[names[0]]
    size, page = int(told.block_size), int(told.page_size_bytes)
    plain = ours.state_bytes or ours.token_bytes * size
    return described(
        replace(ours, block_size=size, padded_bytes=None if page == plain else page), len(names)
    )


def _told(spec: Spec) -> Any:
    """The layer in vLLM's words."""
    import torch
    from vllm.v1 import kv_cache_interface as vllm_specs

    types = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}
    if spec.kind == "state":
        return vllm_specs.MambaSpec(
            block_size=spec.block_size,
            shapes=((spec.state_bytes,),),
            dtypes=(torch.uint8,),
            page_size_padded=spec.padded_bytes,
        )
    plain = {
        "block_size": spec.block_size,
        "num_kv_heads": spec.kv_heads,
        "head_size": spec.head_size,
        "dtype": types[spec.element_bytes],
    }
    if spec.kind == "latent":
        return vllm_specs.MLAAttentionSpec(**plain)
    if spec.window is not None:
        return vllm_specs.SlidingWindowSpec(**plain, sliding_window=spec.window)
    return vllm_specs.FullAttentionSpec(**plain)


def _settings() -> Any:
    """vLLM's settings, of which nothing but how the cache is laid out matters."""
    from vllm.config import VllmConfig

    settings = VllmConfig()
    settings.cache_config.kv_cache_layout = "LBNHC"
    # Any model would do: of its settings the length alone is looked at, and memory is plenty.
    settings.__dict__["model_config"] = SimpleNamespace(max_model_len=1, original_max_model_len=1)
    return settings


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
