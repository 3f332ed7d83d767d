# SPDX-License-Identifier: Apache-2.0
"""How the modes in which the model runs are named and coloured."""

from __future__ import annotations

from analysis.gpu.executions import NONE
from analysis.renderers.html.chart import safe
from analysis.wording.printable import abridged

_COLOURS = {"FULL": "held", "PIECEWISE": "cached", NONE: "free"}


def name(mode: str) -> str:
    return "eager" if mode == NONE else safe(abridged(mode))


def colour(mode: str) -> str:
    return _COLOURS.get(mode, "green")
