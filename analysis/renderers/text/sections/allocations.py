# SPDX-License-Identifier: Apache-2.0
"""How many blocks moved."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.pool.allocations import Allocations
from analysis.renderers.text.layout import Line, row, table


def lines(moves: Allocations) -> Iterator[Line]:
    rows = [
        (name, f"{moved.blocks:,}", f"{moved.calls:,}")
        for name, moved in (
            ("Allocated", moves.allocated),
            ("Reused (prefix hit)", moves.reused),
            ("Freed", moves.freed),
            ("Cached", moves.cached),
        )
    ]
    yield from table(("", "blocks", "calls"), rows)
    if moves.resets or moves.resets_refused:
        refused = f", {moves.resets_refused:,} refused" if moves.resets_refused else ""
        yield from row("Cache resets", f"{moves.resets:,} done{refused}")
