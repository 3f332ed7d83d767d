# SPDX-License-Identifier: Apache-2.0
"""How much of the held blocks was empty."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.pool.fragmentation import Fragmentation
from analysis.renderers.text.layout import Line, row
from analysis.wording.formats import percent, share

WORTH_SHOWING = 0.01
"""The share of empty slots from which on other block sizes are shown."""


def lines(fragmentation: Fragmentation | None) -> Iterator[Line]:
    """A row or two; none where it is not known."""
    if fragmentation is None:
        return
    actual = fragmentation.actual.share
    if actual is None:
        return
    peak = fragmentation.filled_at_peak_pct
    at_peak = "" if peak is None else f", so at the peak {percent(peak)} of all slots were filled"
    held = f"of the slots in held blocks hold no token{at_peak}"
    yield from row("Empty slots", share(actual), held)
    if actual >= WORTH_SHOWING:
        sizes = ", ".join(
            f"{share(empty.share)} at {empty.block_size}" for empty in fragmentation.by_block_size
        )
        yield from row("By block size", sizes)
