# SPDX-License-Identifier: Apache-2.0
"""Which model do a few numbers describe, without a config.json?"""

from __future__ import annotations

from analysis.errors import RuleError
from analysis.plan.model import MOST_LAYERS, Attention, Model, Parameters


def model(
    *,
    layers: int | None,
    kv_heads: int | None,
    head_size: int | None,
    dtype: str,
    parameters: int | None,
    window: int | None,
) -> Model:
    """The model of ``layers`` equal layers.

    Raises:
        RuleError: a number is missing or makes no sense.

    """
    given = {"--layers": layers, "--kv-heads": kv_heads, "--head-size": head_size}
    missing = [option for option, value in given.items() if value is None]
    if missing:
        raise RuleError(f"name a model, or give {', '.join(missing)} too")
    for option, value in {**given, "--parameters": parameters, "--sliding-window": window}.items():
        if value is not None and not 0 < value <= 10**14:
            raise RuleError(f"{option} {value}: write a whole number from 1 on")
    if layers is not None and layers > MOST_LAYERS:
        raise RuleError(f"--layers {layers}: a model has fewer, at most {MOST_LAYERS:,} here")
    kept = Attention(kv_heads or 0, head_size or 0, head_size or 0, window=window)
    return Model(
        name="the numbers given",
        dtype=dtype,
        layers=((kept,),) * (layers or 0),
        max_model_len=None,
        parameters=None if parameters is None else Parameters(0, 0, parameters),
        quantization=None,
        quantized_bytes=None,
        sources={
            "layers": "--layers",
            "kv_heads": "--kv-heads",
            "head_size": "--head-size",
            "dtype": "--dtype",
            **({} if parameters is None else {"parameters": "--parameters"}),
        },
    )
