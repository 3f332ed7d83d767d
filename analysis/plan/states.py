# SPDX-License-Identifier: Apache-2.0
"""How many bytes of one GPU is a state?

The arithmetic of vLLM's ``MambaStateShapeCalculator`` and ``MambaStateDtypeCalculator``.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.errors import RuleError
from analysis.plan.model import Model, State
from analysis.plan.settings import Settings
from analysis.plan.sizes import element_bytes


@dataclass(frozen=True)
class Shape:
    """A state on one GPU: ``inputs`` numbers of its convolution, of ``input_bytes`` each, and
    ``elements`` of the recurrent state, of ``element_bytes`` each."""

    inputs: int
    input_bytes: int
    elements: int
    element_bytes: int


def shape(layer: State, model: Model, settings: Settings) -> Shape:
    """What a state is made of on one GPU.

    Raises:
        RuleError: the GPUs cannot share it.

    """
    gpus = settings.tensor_parallel
    # Groups that cannot be divided are repeated, one on each GPU.
    groups = layer.state_groups if layer.state_groups % gpus == 0 else gpus
    channels = layer.channels + 2 * groups * layer.state_size
    if channels % gpus or layer.elements % gpus:
        raise RuleError(f"--tensor-parallel-size {gpus} does not divide the states of {model.name}")
    return Shape(
        inputs=channels // gpus * layer.conv_steps,
        input_bytes=element_bytes(model.dtype, "--dtype"),
        elements=layer.elements // gpus,
        element_bytes=_element_bytes(layer, model, settings),
    )


def state_bytes(layer: State, model: Model, settings: Settings) -> int:
    """Bytes of a state on one GPU.

    Raises:
        RuleError: the GPUs cannot share it.

    """
    found = shape(layer, model, settings)
    return found.inputs * found.input_bytes + found.elements * found.element_bytes


def _element_bytes(layer: State, model: Model, settings: Settings) -> int:
    """Bytes of a number of the recurrent state: as an engine settled it, else as the model states
    it, else as the platform wants it."""
    plain = element_bytes(model.dtype, "--dtype")
    if settings.state_dtype is not None:
        settled = settings.state_dtype
        return plain if settled == "auto" else element_bytes(settled, "mamba_ssm_cache_dtype")
    if layer.element_bytes is not None:
        return layer.element_bytes
    return 4 if settings.platform.float32_states else plain
