# SPDX-License-Identifier: Apache-2.0
"""The bands of a pool's usage, by the fields of ``analysis.pool.usage.Bands``."""

from __future__ import annotations

BANDS = {
    "under_40": "under 40 %",
    "from_40_to_60": "40 to 60 %",
    "from_60_to_80": "60 to 80 %",
    "from_80_to_90": "80 to 90 %",
    "over_90": "over 90 %",
}
