# SPDX-License-Identifier: Apache-2.0
"""Text of somebody else's in a cell of a CSV file: it stays text, in one line, as it looks.

The collector writes such cells, and the analyzer finds the same names elsewhere.
"""

from __future__ import annotations

import re

HIDDEN = tuple(
    chr(code)
    for code in (
        *range(0x20),
        *range(0x7F, 0xA0),
        0x61C,
        *range(0x200B, 0x2010),
        *range(0x2028, 0x202F),
        *range(0x2060, 0x206A),
        0xFEFF,
    )
)
"""Characters that end a line, drive a terminal, change the order of others, or have no width."""

ESCAPED = tuple(f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}" for c in HIDDEN)
"""What stands in their place."""

ANY_HIDDEN = f"[{''.join(HIDDEN)}]"

FORMULA = r"^\s*[=+@\uff1d\uff0b\uff20\ufe66\ufe62\ufe6b\uff0d\ufe63\u2212-]"
"""How text begins that a spreadsheet takes for a formula: some look behind spaces, and take wide
and small forms of these characters for the usual ones."""

_HIDDEN = re.compile(re.escape("".join(HIDDEN)).join("[]"))
_FORMULA = re.compile(FORMULA)
_ESCAPES = dict(zip(HIDDEN, ESCAPED, strict=True))


def plain(text: str) -> str:
    r"""The text with hidden characters as ``\xNN`` or ``\uNNNN``; with an apostrophe before what a
    spreadsheet would take for a formula.

    >>> plain("=1+1"), plain("a,b"), plain("x\ny") == r"x\x0ay"
    ("'=1+1", 'a,b', True)
    """
    text = _HIDDEN.sub(lambda match: _ESCAPES[match[0]], text)
    return f"'{text}" if _FORMULA.match(text) else text
