# SPDX-License-Identifier: Apache-2.0
"""The names of what a Parquet session has in its folder. ``docs/pack.md`` has the format."""

from __future__ import annotations

INDEX_FILE = "parquet.json"
TEXTS_FILE = "texts.parquet"
"""What is kept as text."""
SUFFIX = "_parquet"
"""Ends the name of a Parquet session that nobody gave a name."""


def table_file(table: str) -> str:
    """The file of the table with this name.

    >>> table_file("kv_cache_usage")
    'kv_cache_usage.parquet'
    """
    return f"{table}.parquet"
