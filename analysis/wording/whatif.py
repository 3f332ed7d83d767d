# SPDX-License-Identifier: Apache-2.0
"""What figures of each engine of ``analysis.whatif`` are called."""

from __future__ import annotations

FIGURES = {"measured": "measured", "exact": "simulated", "fast": "modelled"}
