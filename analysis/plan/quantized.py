# SPDX-License-Identifier: Apache-2.0
"""Which type do quantized weights give to the cache?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MODELOPT = {"fp8": "fp8", "nvfp4": "nvfp4"}
"""The words of ModelOpt's ``kv_cache_quant_algo``."""


def cache_dtype(entries: Mapping[str, Any]) -> str | None:
    """The type that vLLM takes for the cache where ``--kv-cache-dtype`` is ``auto``; None for the
    model's. ``entries``: those of ``quantization_config``."""
    inner = entries.get("quantization")
    places = [inner, entries] if isinstance(inner, Mapping) else [entries]
    for place in places:
        scheme = place.get("kv_cache_scheme")
        if isinstance(scheme, Mapping) and scheme.get("type") == "float":
            if scheme.get("num_bits") == 8:
                return "fp8"
            if scheme.get("num_bits") == 4:
                return "nvfp4"
    for place in places:
        algorithm = place.get("kv_cache_quant_algo")
        if isinstance(algorithm, str):
            return _MODELOPT.get(algorithm.lower())
    return None
