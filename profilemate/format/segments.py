# SPDX-License-Identifier: Apache-2.0
"""The names of what a session that was cut into segments has in its folder.

``docs/session-format.md`` has the format.
"""

from __future__ import annotations

INDEX_FILE = "segment.json"
CLOSING_PREFIX = ".closing-"
"""Begins the name of the folder of a segment that is being closed."""
OPENING_PREFIX = "opening."
"""Begins the name of a file that explains how things stood when its segment began."""


def folder_name(number: int) -> str:
    """The folder of a segment.

    >>> folder_name(3), folder_name(12345)
    ('0003', '12345')
    """
    return f"{number:04d}"


def packed_name(file: str, number: int) -> str:
    """A segment's file with rows of the table that the session has under this name.

    >>> packed_name("kv_cache_usage.csv", 3)
    'kv_cache_usage.0003.csv.gz'
    """
    stem, _, kind = file.rpartition(".")
    return f"{stem}.{folder_name(number)}.{kind}.gz"


def opening_name(file: str) -> str:
    """A segment's file with opening rows of the table.

    >>> opening_name("kv_cache_usage.csv")
    'opening.kv_cache_usage.csv.gz'
    """
    return f"{OPENING_PREFIX}{file}.gz"
