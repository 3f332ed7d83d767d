# SPDX-License-Identifier: Apache-2.0
"""What happened, in a few sentences."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.judgement.story import sentences
from analysis.renderers.text.layout import Line, note
from analysis.summary import Summary


def lines(summary: Summary) -> Iterator[Line]:
    """The story, a paragraph a sentence."""
    for sentence in sentences(summary):
        yield from note(sentence)
