# SPDX-License-Identifier: Apache-2.0
"""What ran, where, and what recording it took."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.text import session
from analysis.summary import Summary

Row = tuple[str, str]


def rows(summary: Summary) -> Iterator[Row]:
    """The facts that the text output has, as a label and what there is to say."""
    lines = [*session.lines(summary.session, summary.facts), *session.profiling(summary.cost)]
    label, words = "", [""]
    for (head, _), *pieces in lines:
        text = "".join(piece for piece, _ in pieces).strip()
        if head.strip():
            if label:
                yield label, " ".join(words)
            label, words = head.strip(), [text]
        else:
            words.append(text)
    if label:
        yield label, " ".join(words)
