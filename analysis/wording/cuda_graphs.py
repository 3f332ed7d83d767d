# SPDX-License-Identifier: Apache-2.0
"""Why batches ran eagerly, and which capture sizes are set side by side."""

from __future__ import annotations

from analysis.gpu.capture_sizes import CaptureSizes, Fit

WHY_EAGER = {
    "asked_none": "No graphs asked for",
    "resolved_none": "Resolved to no graphs",
    "not_captured": "None captured",
    "too_large": "Larger than any graph",
    "decode_only": "Graphs for decodes only",
    "not_replayed": "Graph not replayed",
    "other": "Another reason",
}
"""By the reasons of ``analysis.gpu.cuda_graphs``."""

TODAY, LEAST_PADDING, FEWEST = "today's", "least padding", "fewest"


def fits(sizes: CaptureSizes) -> list[tuple[str, Fit]]:
    """Today's sizes, then those that would do better, each under its name."""
    better, fewest = sizes.least_padding, sizes.fewest
    found = [(TODAY, sizes.today)]
    if better is not None and better.sizes != sizes.today.sizes:
        found.append((LEAST_PADDING, better))
    if fewest is not None and len(fewest.sizes) < len(sizes.today.sizes):
        found.append((FEWEST, fewest))
    return found
