# SPDX-License-Identifier: Apache-2.0
"""Which config.json has a model of each architecture that vLLM has a class for?

No config.json is at hand. The defaults of transformers' and vLLM's own classes of configurations
make one where an architecture has such a class.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PUBLIC = Path(__file__).parents[2] / "tests" / "plan" / "configs"
DRAFTING = "drafts for another model, and is not planned alone"
NO_CONFIG = "no class of configurations has defaults for it"


def architectures() -> Mapping[str, tuple[str, str]]:
    """All architectures of vLLM's registry, and the module and class that each has."""
    from vllm.model_executor.models import registry

    return {name: (found[0], found[1]) for name, found in registry._VLLM_MODELS.items()}


def is_drafting(name: str) -> bool:
    """Whether the model of this architecture only drafts for another one."""
    from vllm.model_executor.models import registry

    return name in registry._SPECULATIVE_DECODING_MODELS


def config_of(name: str) -> str | None:
    """The text of a config.json for this architecture; None where there is none.

    A public model's, as the tests have it, comes before defaults.
    """
    for file in sorted(PUBLIC.glob("*.json")):
        entries = json.loads(file.read_text())
        if entries["architectures"] == [name]:
            # The weights of this check are not quantized.
            entries.pop("quantization_config", None)
            return json.dumps(entries)
    for kind in _kinds(name):
        try:
            entries = json.loads(kind().to_json_string(use_diff=False))
        except Exception:
            continue
        return json.dumps(_completed({**entries, "architectures": [name]}))
    return None


def _completed(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries with those that models have, and defaults leave out."""
    inner = entries.get("text_config")
    if isinstance(inner, dict):
        entries["text_config"] = _completed(inner)
    # Another spelling of the size of a head.
    other = "attention_head_dim"
    heads, hidden = entries.get("num_attention_heads"), entries.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads:
        for key, value in (("num_key_value_heads", heads), ("head_dim", hidden // heads)):
            missing = key not in entries and key == "head_dim" and other not in entries
            if missing or entries.get(key, 0) is None:
                entries[key] = value
    return entries


def _kinds(name: str) -> Iterator[Any]:
    """The classes of configurations for this architecture, the closest first."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    known = architectures()
    alike = [other for other, found in known.items() if found == known.get(name)]
    for other in dict.fromkeys((name, *alike)):
        for family in _families().get(other, ()):
            if family in _CONFIG_REGISTRY:
                yield _CONFIG_REGISTRY[family]
            elif family in CONFIG_MAPPING:
                yield CONFIG_MAPPING[family]
        plain = _plain(other)
        for family in _CONFIG_REGISTRY:
            kind = _CONFIG_REGISTRY[family]
            if plain.startswith(_plain(family)) or _plain(kind.__name__) == plain + "config":
                yield kind


def _families() -> Mapping[str, list[str]]:
    """The families of transformers by the names of their classes."""
    from transformers.models.auto import modeling_auto

    found: dict[str, list[str]] = {}
    for mapping in (name for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES")):
        for family, classes in getattr(modeling_auto, mapping).items():
            for one in (classes,) if isinstance(classes, str) else classes:
                found.setdefault(one, []).append(family)
    return found


def _plain(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())
