# SPDX-License-Identifier: Apache-2.0
"""How many bytes does a state take on one GPU?

This is the arithmetic of vLLM's ``MambaStateShapeCalculator`` and ``MambaStateDtypeCalculator``.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.errors import RuleError
from analysis.plan.model import Model, State
from analysis.plan.settings import Settings
from analysis.plan.sizes import element_bytes


@dataclass(frozen=True)
class Shape:
    """A state on one GPU: ``inputs`` numbers of its convolution, of ``input_bytes`` bytes each,
    and ``elements`` numbers of the recurrent state, of ``element_bytes`` bytes each."""

    inputs: int
    input_bytes: int
    elements: int
    element_bytes: int


def shape(layer: State, model: Model, settings: Settings) -> Shape:
    """The shape of a state on one GPU.

    Raises:
        RuleError: the GPUs cannot share the state, or the type of its numbers is not known here.

    """
    gpus = settings.tensor_parallel
    # Where the GPUs cannot divide the groups, each GPU holds one.
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
        RuleError: the GPUs cannot share the state, or the type of its numbers is not known here.

    """
    found = shape(layer, model, settings)
    return found.inputs * found.input_bytes + found.elements * found.element_bytes


def _element_bytes(layer: State, model: Model, settings: Settings) -> int:
    """Bytes of one number of the recurrent state: by the recorded engine's type, else by the
    model's type for states, else by the platform's."""
    plain = element_bytes(model.dtype, "--dtype")
    if settings.state_dtype is not None:
        chosen = settings.state_dtype
        return plain if chosen == "auto" else element_bytes(chosen, "mamba_ssm_cache_dtype")
    if layer.element_bytes is not None:
        return layer.element_bytes
    return 4 if settings.platform.float32_states else plain
