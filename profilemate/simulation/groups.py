# SPDX-License-Identifier: Apache-2.0
"""Which groups, and which block size, does the installed vLLM make of a model's layers?

This calls vLLM's own ``get_kv_cache_configs``, with memory enough for any pool. vLLM divides the
memory by a block's bytes, so these follow from the number of blocks.
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
from profilemate.simulation.memory import SeveralSizesError, bytes_per_block, deciding
from profilemate.simulation.words import said


class NoVllmError(Exception):
    """vLLM cannot say; the text says why, in one line."""


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
        asked = [{name: _vllm_spec(spec) for name, spec in stage.items()} for stage in stages]
    except Exception as error:
        raise NoVllmError(f"{vllm.__version__} has other settings: {_line(error)}") from None

    def made(stage: int) -> Any:
        memory = deciding(stage, len(stages))
        try:
            return kv_cache_utils.get_kv_cache_configs(settings, asked, memory)
        except (NotImplementedError, ValueError) as error:
            raise RuleError(
                f"vLLM {vllm.__version__} refuses these layers: {_line(error)}"
            ) from None
        except Exception as error:
            raise NoVllmError(f"{vllm.__version__} fails: {_line(error)}") from None

    found = [made(stage) for stage in range(len(stages))]
    try:
        return _layout(stages, found, vllm.__version__)
    except (ArithmeticError, LookupError, ValueError) as error:
        raise NoVllmError(f"{vllm.__version__} makes odd groups: {_line(error)}") from None


def _layout(stages: Sequence[Stage], found: Sequence[Any], version: str) -> Layout:
    """The groups that vLLM made, once for each stage as the one that decides."""
    specs = {name: spec for stage in stages for name, spec in stage.items()}
    try:
        sizes = bytes_per_block(found)
    except SeveralSizesError as error:
        raise NoVllmError(str(error)) from None
    return Layout(
        groups=tuple(
            _group(parts, specs)
            for parts in zip(*(one.kv_cache_groups for one in found[0]), strict=True)
        ),
        bytes_per_block=sizes,
        decided_by=f"vLLM {version}",
    )


def _group(parts: Sequence[Any], specs: Stage) -> Group:
    """A group as all stages have it together."""
    names = [name for part in parts for name in part.layer_names]
    spec = parts[0].kv_cache_spec
    # A group of layers of several sizes has a spec for each.
    each = getattr(spec, "kv_cache_specs", None)
    theirs = next(iter(each.values())) if each else spec
    ours = specs[names[0]]
    size, page = int(theirs.block_size), int(theirs.page_size_bytes)
    plain = ours.state_bytes or ours.token_bytes * size
    return described(
        replace(ours, block_size=size, padded_bytes=None if page == plain else page), len(names)
    )


def _vllm_spec(spec: Spec) -> Any:
    """The layer as vLLM's own class describes it."""
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
    if spec.kind == "chunked":
        return vllm_specs.ChunkedLocalAttentionSpec(**plain, attention_chunk_size=spec.window)
    if spec.window is not None:
        return vllm_specs.SlidingWindowSpec(**plain, sliding_window=spec.window)
    return vllm_specs.FullAttentionSpec(**plain)


def _settings() -> Any:
    """vLLM's settings, of which only the layout of the cache matters."""
    from vllm.config import VllmConfig

    settings = VllmConfig()
    settings.cache_config.kv_cache_layout = "LBNHC"
    # Any model would do: vLLM reads only its length here, and memory is plenty.
    settings.__dict__["model_config"] = SimpleNamespace(max_model_len=1, original_max_model_len=1)
    return settings


def _line(error: Exception) -> str:
    return said(error) or type(error).__name__
