# SPDX-License-Identifier: Apache-2.0
"""Which model is planned: one with a config.json, or one that plain numbers describe?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.errors import RuleError

if TYPE_CHECKING:
    from analysis.plan.model import Model


def chosen(
    name: str | None,
    numbers: Mapping[str, int | None],
    *,
    dtype: str | None,
    parameters: str | None,
) -> tuple[Model, Path | None] | None:
    """The model and the folder of its weights; None where neither a name nor a number is given.

    Args:
        name: a folder, a config.json, or a name on the Hugging Face Hub.
        numbers: layers, kv_heads, head_size and window of a model without a name.
        dtype: the type of the weights, in place of the model's own.
        parameters: how many parameters the model has, as text.

    Raises:
        RuleError: there is no such model, or the options make no sense.

    """
    from analysis.plan import numbers as plain

    count = None if parameters is None else _count(parameters)
    given = [option for option, value in numbers.items() if value is not None]
    if name is not None and given:
        option = given[0].replace("_", "-").replace("window", "sliding-window")
        raise RuleError(f"--{option} is for a plan without MODEL; leave out one of the two")
    if name is not None:
        return _named(name, dtype, count)
    if given:
        return plain.model(**numbers, dtype=dtype or "bfloat16", parameters=count), None
    return None


def _named(name: str, dtype: str | None, parameters: int | None) -> tuple[Model, Path | None]:
    from analysis.plan import config, local
    from analysis.plan.model import Parameters
    from analysis.plan.sizes import element_bytes

    path = local.find(name)
    model = config.read_or_say(path, name=name)
    if dtype not in (None, "auto"):
        element_bytes(str(dtype), "--dtype")
        model = replace(model, dtype=str(dtype), sources={**model.sources, "dtype": "--dtype"})
    if parameters is not None:
        sources = {**model.sources, "parameters": "--parameters"}
        # The count that the user gives replaces what the folder's files say.
        return replace(model, parameters=Parameters(0, 0, parameters), sources=sources), None
    return model, path if path.is_dir() else None


def entries_of(model: Model) -> Mapping[str, Any] | None:
    """The entries of the config.json that the model was read from; None where it has none."""
    from analysis.plan import config, local

    try:
        return config.entries(local.find(model.name))
    except RuleError:
        return None


def _count(text: str) -> int:
    """A number of parameters: 8030261248, 8.03e9, 8B, 70b, 125M."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?(?:e\d{1,2})?) ?([kmbt]?)", text.strip().lower())
    scale = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
    count = round(float(match[1]) * scale[match[2]]) if match else 0
    if not 0 < count <= 10**14:
        raise RuleError(
            f"--parameters {text!r} is not a number of parameters; write 8030261248 or 8B"
        )
    return count
