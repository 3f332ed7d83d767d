# SPDX-License-Identifier: Apache-2.0
"""The figures of a session by one kind of key, as text for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from analysis.renderers.text.layout import Line, section
from analysis.renderers.text.painting import paint, plain
from analysis.renderers.text.sections import by_whom
from analysis.renderers.text.summary import header
from analysis.requests.by_whom import Split
from analysis.summary import Summary
from analysis.wording.sections import BY_WHOM

SHOWN = 20
"""How many keys are named."""


def write(found: Summary, split: Split, out: TextIO) -> None:
    """Print the split."""
    paint(lambda _: _layout(found, split), out)


def render(found: Summary, split: Split) -> str:
    """The same as plain text."""
    return plain(lambda _: _layout(found, split))


def _layout(found: Summary, split: Split) -> Iterator[Line]:
    yield from header(found)
    yield from section(BY_WHOM, _lines(found, split))


def _lines(found: Summary, split: Split) -> Iterator[Line]:
    if found.by_whom.known_elsewhere_tokens:
        yield from by_whom.new_to_their_own(found.by_whom.known_elsewhere_tokens)
    yield from by_whom.whole(split, SHOWN)
