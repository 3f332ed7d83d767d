# SPDX-License-Identifier: Apache-2.0
"""The colours that a chart sets side by side differ for people who see red and green alike, too."""

from __future__ import annotations

import re
from itertools import product

import pytest

from tests.report.conftest import ROOT

STYLE = (ROOT / "analysis" / "renderers" / "html" / "page.css").read_text()

# What each of them makes of linear red, green and blue: G. M. Machado, M. M. Oliveira and
# L. A. F. Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency"
# (2009), table for severity 1.0.
SIGHT = {
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
}
# Side by side in: the pool, the timeline and evictions; what waits and runs; regret; rent; ages;
# memory at start-up; GPUs.
PAIRS = [
    ("held", "cached"),
    ("held", "free"),
    ("cached", "free"),
    ("regret", "purple"),
    ("regret", "free"),
    ("regret", "held"),
    ("green", "cached"),
    ("purple", "green"),
    ("held", "green"),
]
APART = 25
"""As CIE 1976 counts differences; 2.3 are just noticed side by side."""

Three = tuple[float, float, float]


def linear(colour: str) -> Three:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return red, green, blue


def times(matrix: tuple[Three, ...], vector: Three) -> Three:
    one, two, three = (sum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix)
    return one, two, three


def lab(colour: Three) -> Three:
    """CIE L*a*b*, for the white of sRGB."""
    to_xyz = (
        (0.4124564, 0.3575761, 0.1804375),
        (0.2126729, 0.7151522, 0.0721750),
        (0.0193339, 0.1191920, 0.9503041),
    )
    white = (0.95047, 1.0, 1.08883)
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (part / full for part, full in zip(times(to_xyz, colour), white, strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def difference(one: Three, other: Three) -> float:
    return sum((a - b) ** 2 for a, b in zip(lab(one), lab(other), strict=True)) ** 0.5


@pytest.mark.parametrize("theme", [0, 1])
def test_neighbours_can_be_distinguished(theme: int) -> None:
    defined = dict(re.findall(r"--([a-z]+): light-dark\(([^)]+)\)", STYLE))
    colours = {name: value.split(", ")[theme] for name, value in defined.items()}
    for (one, other), (sight, matrix) in product(PAIRS, SIGHT.items()):
        seen = [times(matrix, linear(colours[name])) for name in (one, other)]
        assert difference(*seen) > APART, (one, other, sight)
