# SPDX-License-Identifier: Apache-2.0
"""What does an error of vLLM's say? One line, without the frame that pydantic puts around it."""

from __future__ import annotations


def said(error: BaseException) -> str:
    """The error's text in one line; empty where it has none.

    >>> said(ValueError("1 validation error for C\\n  Value error, x (4) is too small [type=y]"))
    'x (4) is too small'
    """
    text = " ".join(str(error).split())
    # pydantic's errors begin with how many there are, and end with where to read about them.
    text = text.partition("Value error, ")[2] or text
    return text.partition(" [type=")[0]
