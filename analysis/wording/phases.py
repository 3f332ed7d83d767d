# SPDX-License-Identifier: Apache-2.0
"""Words for the phases of a step (``analysis.tables.phases.PHASES``)."""

from __future__ import annotations

PHASES = {
    "prefill": "Prefill alone",
    "mixed": "Mixed",
    "decode": "Decode alone",
}
