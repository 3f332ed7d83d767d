# SPDX-License-Identifier: Apache-2.0
"""How does a request's id of requests.jsonl read in the other tables?

There control characters are spelled out, and what a spreadsheet would take for a formula begins
with an apostrophe.
"""

from __future__ import annotations

import polars as pl

_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]
_SPELLED = {chr(code): f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _CONTROLS}


def as_cells(ids: pl.Expr) -> pl.Expr:
    """The ids as they stand in the CSV tables."""
    spelled = ids.str.replace_many(_SPELLED)
    formula = spelled.str.contains(r"^[=+\-@]")
    return pl.when(formula).then(pl.lit("'") + spelled).otherwise(spelled)
