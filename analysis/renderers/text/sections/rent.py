# SPDX-License-Identifier: Apache-2.0
"""Who held how much of the cache for how long."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.prefix.rent import Rent, Renter
from analysis.renderers.text.layout import Line, note, row, table
from analysis.wording.printable import shortened

SHOWN = 5


def lines(rent: Rent) -> Iterator[Line]:
    """The section; empty where nothing was ever held."""
    if not rent.renters:
        return
    parts = [
        f"{_rent(rent.waiting)} until the first token",
        f"{_rent(rent.decoding)} decoding",
    ]
    if rent.running:
        parts.append(f"{_rent(rent.running)} of requests that have not ended")
    if rent.shared:
        parts.append(f"{_rent(rent.shared)} paid by several at once")
    yield from row("Held", f"{_rent(rent.pool_held)} block-seconds", f"({', '.join(parts)})")
    saved = f"in which the cache saved {rent.saved_tokens:,} tokens"
    if rent.saved_per_kept is not None:
        saved += f", {_rent(rent.saved_per_kept)} a block-second"
    yield from row("Kept unheld", f"{_rent(rent.pool_kept)} block-seconds", saved)
    rows = [_renter(renter) for renter in rent.top[:SHOWN]]
    yield from table(("Block-seconds", "to 1st token", "decoding", "kept", "tokens saved"), rows)
    yield from note(
        "A block held by several requests counts for each. Kept: what the request left in the "
        "cache, until it was evicted. Tokens saved: what later requests found of that."
    )
    if not rent.exact:
        yield from note(
            "Figures by request are approximate: groups without full attention free blocks while "
            "a request runs, and vLLM does not always say whose."
        )


def _renter(renter: Renter) -> tuple[str, ...]:
    decoding = _rent(renter.decoding)
    if renter.running:
        decoding = f"{_rent(renter.running)} so far"
    return (
        shortened(renter.request_id, 22),
        _rent(renter.waiting),
        decoding,
        _rent(renter.kept),
        "n/a" if renter.shared_tokens is None else f"{renter.shared_tokens:,}",
    )


def _rent(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
