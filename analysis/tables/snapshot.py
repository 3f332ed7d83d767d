# SPDX-License-Identifier: Apache-2.0
"""Of which session is this one a snapshot, and why was it taken?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis.tables.metadata import flag, part, text


@dataclass(frozen=True)
class Snapshot:
    """``of``: the session's name. ``taken_at``: the wall clock (ISO 8601, UTC). ``was_running``:
    vLLM went on. Then the tables need not reach equally far, and requests had not ended.
    ``reason``: why it was taken; None where that is not known."""

    of: str
    taken_at: str
    was_running: bool
    reason: str | None


def of(metadata: Mapping[str, Any]) -> Snapshot | None:
    """What metadata.json says; None for a session that is none."""
    said = part(metadata, "snapshot")
    name, taken_at = text(said.get("of")), text(said.get("taken_at"))
    if name is None or taken_at is None:
        return None
    was_running = flag(said.get("was_running")) is not False
    return Snapshot(name, taken_at, was_running, text(said.get("reason")))
