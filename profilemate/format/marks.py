# SPDX-License-Identifier: Apache-2.0
"""Moments that the user marked: ``marks.jsonl`` of a session, one JSON object a line.

``profilemate mark`` appends to it while vLLM runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

MARKS_FILE = "marks.jsonl"

MOST_MARKS = 1000
LONGEST_TEXT = 200
"""Characters."""

MAX_BYTES = MOST_MARKS * (12 * LONGEST_TEXT + 100)


@dataclass(frozen=True)
class Mark:
    """``at_sec``: when, in seconds since the session began. ``text``: what the user called it."""

    at_sec: float
    text: str


def text_of_mark(text: str) -> str:
    """The text as a mark has it: any white space is one space, and none is around it."""
    return " ".join(text.split())


def line(mark: Mark) -> bytes:
    """The mark's line in the file."""
    return json.dumps({"timestamp_sec": round(mark.at_sec, 6), "text": mark.text}).encode() + b"\n"


def parse(content: bytes) -> Iterator[Mark]:
    """The marks in the file, those that are whole."""
    for each in content[:MAX_BYTES].splitlines()[:MOST_MARKS]:
        try:
            found = json.loads(each)
            at, text = float(found["timestamp_sec"]), found["text"]
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
        if isfinite(at) and isinstance(text, str):
            yield Mark(at, text[:LONGEST_TEXT])
