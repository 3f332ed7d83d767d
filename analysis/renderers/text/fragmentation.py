# SPDX-License-Identifier: Apache-2.0
"""How much of the held blocks was empty."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.pool.fragmentation import Empty, Fragmentation
from analysis.renderers.text.layout import Line, row
from analysis.wording.formats import percent, share

WORTH_TELLING = 0.01
"""The share of empty slots from which on block sizes are told."""


def lines(fragmentation: Fragmentation | None) -> Iterator[Line]:
    """A row or two; none where the session cannot tell."""
    if fragmentation is None:
        return
    actual = _share(fragmentation.actual)
    if actual is None:
        return
    peak = fragmentation.filled_at_peak_pct
    at_peak = "" if peak is None else f", so at the peak {percent(peak)} of all slots were filled"
    held = f"of the slots in held blocks hold no token{at_peak}"
    yield from row("Empty slots", share(actual), held)
    if actual >= WORTH_TELLING:
        sizes = ", ".join(
            f"{share(_share(empty))} at {empty.block_size}" for empty in fragmentation.by_block_size
        )
        yield from row("By block size", sizes)


def _share(empty: Empty) -> float | None:
    return empty.at_end if empty.over_time is None else empty.over_time
